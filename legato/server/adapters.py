"""The LoRA adapters of a shard: all of them in host memory, some of them on the device.

Which ones are on the device, and where, is up to the router (`AdapterPlacement`). Reading an adapter touches neither
the device nor the steps, so that it can go on beside them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from legato.common.errors import LegatoError, OptionError, UnsupportedModel
from legato.common.options import ServerOptions
from legato.kernels.lora.pages import PAGE_RANKS
from legato.layers.lora import DeviceAdapters, HostAdapter, StepAdapters
from legato.modelfiles.adapters import parse_adapters
from legato.modelfiles.locate import locate_adapter
from legato.models.peft import adapter_modules, adapter_rank, read_adapter
from legato.models.targets import AdapterTarget, LoraLayout, usual_modules
from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.server.loading import LoadedModel
from legato.server.memory.budget import available_ram
from legato.server.memory.capacity import gib

logger = logging.getLogger(__name__)

# Defaults of --lora-max-rank and --lora-device-ranks.
LEAST_MAX_RANK = 64
LEAST_DEVICE_RANKS, MOST_DEVICE_RANKS = 256, 1024
# Of the host's free memory, what one adapter may take.
HOST_SHARE = 0.5


class UnknownAdapter(RequestRefused):
    def __init__(self, name: str) -> None:
        super().__init__(f"no adapter {name!r} is loaded", grpc.StatusCode.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What --lora-… options say, with their defaults filled in."""

    max_rank: int
    device_ranks: int
    modules: frozenset[str]

    @classmethod
    def choose(
        cls,
        folders: Sequence[Path],
        targets: Sequence[AdapterTarget],
        *,
        max_rank: int | None,
        device_ranks: int | None,
        modules: Sequence[str],
        at_runtime: bool,
    ) -> AdapterLimits:
        """`folders` are those of the adapters that are there from the start."""
        ranks = [adapter_rank(folder) for folder in folders]
        wanted = set(modules) or {module for folder in folders for module in adapter_modules(folder)}
        if at_runtime and not modules:
            wanted |= usual_modules(targets)
        padded = sum(-(-rank // PAGE_RANKS) * PAGE_RANKS for rank in ranks)
        max_rank = max_rank or max([*ranks, LEAST_MAX_RANK])
        least = max(LEAST_DEVICE_RANKS, max_rank)
        return cls(max_rank, device_ranks or min(max(padded, least), max(MOST_DEVICE_RANKS, least)), frozenset(wanted))


class ShardAdapters:
    def __init__(
        self, targets: Sequence[AdapterTarget], limits: AdapterLimits, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layout = LoraLayout(targets, limits.modules)
        if unknown := limits.modules - self._layout.modules:
            known = ", ".join(sorted(self._layout.modules))
            raise UnsupportedModel(f"--lora-target-modules: the model has no {min(unknown)!r}; it has {known}")
        self._dtype = dtype
        self._max_rank = min(limits.max_rank, limits.device_ranks)
        num_pages, max_pages = limits.device_ranks // PAGE_RANKS, -(-self._max_rank // PAGE_RANKS)
        self.device = DeviceAdapters(
            num_pages, max_pages, self._layout.page_size, len(self._layout.places), dtype, device
        )
        self._layout.attach(self.device)
        self._adapters: dict[str, tuple[HostAdapter, str]] = {}  # with the folder of each
        self._loader: ThreadPoolExecutor | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def __getitem__(self, name: str) -> HostAdapter:
        if name not in self._adapters:
            raise UnknownAdapter(name)
        return self._adapters[name][0]

    @property
    def infos(self) -> list[pb.AdapterInfo]:
        return [self.info(name) for name in self._adapters]

    def info(self, name: str) -> pb.AdapterInfo:
        return pb.AdapterInfo(adapter_id=name, path=self._adapters[name][1], num_pages=self[name].num_pages)

    @property
    def loader(self) -> ThreadPoolExecutor:
        """The thread that reads adapters at run time. It has no OpenMP threads of its own: a second team of them would
        slow down the engine's."""
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "adapters", initializer=torch.set_num_threads, initargs=(1,))
        return self._loader

    def load(self, name: str, path: str) -> pb.AdapterInfo:
        """From a folder. One of the same name is replaced, unless this one is wrong. LegatoError."""
        started = time.perf_counter()
        needed = -(-adapter_rank(Path(path)) // PAGE_RANKS) * self._layout.page_size * self._dtype.itemsize
        if needed > available_ram() * HOST_SHARE:
            raise LegatoError(f"{path}: the adapter would take {gib(needed)} of host memory, and too little is free")
        pin = self.device.on_device.pages.is_cuda
        made = read_adapter(name, Path(path), self._layout, self._dtype, max_rank=self._max_rank, pin=pin)
        self._adapters[name] = (made, path)
        fields = {"adapter": name, "seconds": round(time.perf_counter() - started, 3), "bytes": made.pages.nbytes}
        logger.info("Adapter loaded", extra={"fields": fields})
        return self.info(name)

    def unload(self, name: str) -> None:
        self[name]
        del self._adapters[name]
        logger.info("Adapter unloaded", extra={"fields": {"adapter": name}})

    # ---- steps, on the engine's thread -----------------------------------------------------------------------------

    def place(self, placements: Iterable[pb.AdapterPlacement]) -> None:
        for placement in placements:
            self.device.place(self[placement.adapter_id], placement.slot, list(placement.pages))

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """While there is an adapter of the largest rank in slot 0, for warm-up."""
        self.device.pretend(0, True)
        try:
            yield
        finally:
            self.device.pretend(0, False)

    def begin(self, step: StepAdapters | None) -> None:
        """The step that is computed next, if any of its rows has an adapter."""
        self.device.begin(None)
        if step is not None:
            step.begin()


def open_adapters(loaded: LoadedModel, options: ServerOptions) -> ShardAdapters | None:
    """The adapters of --lora-adapters; None if there are none and none may come. OptionError, ModelError."""
    sources = parse_adapters(options.lora_adapters)
    if not sources and not options.lora_allow_runtime:
        return None
    model_type, has_encoder = loaded.model.config.model_type, loaded.model.config.decoder_start_token_id is not None
    if not loaded.targets or has_encoder:
        raise OptionError(f"--lora-adapters: LoRA adapters are not supported for model_type '{model_type}'")
    folders = [locate_adapter(source, options.huggingface_hub_cache) for source in sources]
    limits = AdapterLimits.choose(
        folders,
        loaded.targets,
        max_rank=options.lora_max_rank,
        device_ranks=options.lora_device_ranks,
        modules=options.lora_target_modules,
        at_runtime=options.lora_allow_runtime,
    )
    adapters = ShardAdapters(loaded.targets, limits, loaded.dtype, loaded.device)
    for source, folder in zip(sources, folders, strict=True):
        adapters.load(source.name, str(folder))
    on_device = adapters.device.on_device.pages.nbytes
    fields = {"adapters": len(sources), "device_ranks": limits.device_ranks, "device_memory": gib(on_device)}
    logger.info("LoRA adapters", extra={"fields": fields})
    return adapters
