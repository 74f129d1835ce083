"""LoRA adapters of a fake shard: their configurations are read, their matrices are not, and placements are checked."""

from __future__ import annotations

import zlib
from pathlib import Path

from legato.common.options import ServerOptions
from legato.modelfiles.adapters import parse_adapters, read_config
from legato.modelfiles.locate import locate_adapter
from legato.pb import generate_pb2 as pb

# As the kernels have it; they bring in torch.
PAGE_RANKS = 8
DEFAULT_RANKS = 1024


class FakeAdapters:
    def __init__(self, num_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.loaded: dict[str, pb.AdapterInfo] = {}
        self._slots: dict[int, tuple[str, frozenset[int]]] = {}

    @classmethod
    def open(cls, options: ServerOptions) -> FakeAdapters:
        sources = parse_adapters(options.lora_adapters)
        if not sources and not options.lora_allow_runtime:
            return cls()
        made = cls((options.lora_device_ranks or DEFAULT_RANKS) // PAGE_RANKS)
        for source in sources:
            made.load(source.name, str(locate_adapter(source, options.huggingface_hub_cache)))
        return made

    def load(self, name: str, path: str) -> pb.AdapterInfo:
        config = read_config(Path(path))
        rank = max(config.rank, *config.ranks.values()) if config.ranks else config.rank
        self.loaded[name] = pb.AdapterInfo(adapter_id=name, path=path, num_pages=-(-rank // PAGE_RANKS))
        return self.loaded[name]

    def unload(self, name: str) -> None:
        self.loaded.pop(name, None)

    def place(self, placement: pb.AdapterPlacement) -> str | None:
        """What is wrong with it, if anything is."""
        name, slot, pages = placement.adapter_id, placement.slot, frozenset(placement.pages)
        if name not in self.loaded:
            return f"adapter {name!r} is placed and not loaded"
        if slot >= self.num_pages or any(page >= self.num_pages for page in pages):
            return f"adapter {name!r}: slot {slot} or a page is beyond {self.num_pages}"
        if len(pages) != self.loaded[name].num_pages:
            return f"adapter {name!r} has {self.loaded[name].num_pages} pages, {len(pages)} were named"
        # What shared a page with it is overwritten.
        self._slots = {other: there for other, there in self._slots.items() if not there[1] & pages}
        self._slots[slot] = (name, pages)
        return None

    def fingerprint(self, admission: pb.Admission) -> int | None:
        """With which the fingerprints of a row's tokens begin; None if its adapter is not where it is said to be."""
        if not admission.adapter_id:
            return 0
        if self._slots.get(admission.adapter_slot, ("", frozenset()))[0] != admission.adapter_id:
            return None
        return zlib.crc32(admission.adapter_id.encode())
