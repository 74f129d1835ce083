"""The LoRA adapters that requests may name: those of the start, and what is loaded and unloaded at run time.

The shards have them in host memory, the scheduler knows their size, and every HTTP worker knows their names. An adapter
that is being unloaded is refused to new requests at once and goes when the last request that uses it has ended.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from legato.common.errors import LegatoError, ModelError, OptionError
from legato.modelfiles.adapters import AdapterSource, read_config, weights_file
from legato.modelfiles.locate import locate_adapter
from legato.pb import generate_pb2 as pb
from legato.router.shards import AdapterFailed, GrpcShards, ShardsLost
from legato.router.step_loop import StepLoop
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import Output
from legato.telemetry.metrics import adapter_labels

logger = logging.getLogger(__name__)

# Seconds between two looks at whether the requests of an adapter that is unloaded have ended.
LOOK_SECONDS = 0.05


class AdapterRefused(LegatoError):
    """A change that cannot be made. `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """What may be loaded at run time: `--lora-allow`."""

    allowed: tuple[str, ...]
    cache: str | None = None  # --huggingface-hub-cache

    def __post_init__(self) -> None:
        if not self.allowed:
            raise OptionError("--lora-allow-runtime needs --lora-allow: the folders and repositories to load from")

    def check(self, source: str) -> None:
        """A folder below an allowed one, links followed, or an allowed repository."""
        if not (self._is_allowed_folder(source) if os.path.isabs(source) else self._is_allowed_repository(source)):
            raise AdapterRefused(f"`lora_path`: {source!r} is not within --lora-allow of this server", 403)

    def _is_allowed_folder(self, source: str) -> bool:
        path = Path(os.path.realpath(source))
        roots = [Path(os.path.realpath(each)) for each in self.allowed if os.path.isabs(each)]
        return any(path.is_relative_to(root) for root in roots)

    def _is_allowed_repository(self, source: str) -> bool:
        """An id is never a folder that happens to be there."""
        if ".." in source or os.path.exists(source):
            return False
        return any(fnmatch.fnmatchcase(source, each) for each in self.allowed if not os.path.isabs(each))


class AdapterRegistry:
    def __init__(
        self,
        steps: StepLoop,
        loaded: Iterable[pb.AdapterInfo],
        rules: AdapterRules | None,
        reserved: Iterable[str] = (),
    ) -> None:
        """`loaded` is what the shards have; `reserved` names mean the base model. Without `rules` nothing changes at
        run time."""
        self._steps = steps
        self._rules = rules
        self._reserved = frozenset(reserved)
        self._numbers = itertools.count(1)
        self._names: dict[str, AdapterInfo] = {}
        self._changing: set[str] = set()
        # Told of all names whenever they change.
        self.on_change: Callable[[], None] = lambda: None
        for adapter in loaded:
            self._add(adapter)

    @property
    def adapters(self) -> list[AdapterInfo]:
        return list(self._names.values())

    def _add(self, adapter: pb.AdapterInfo) -> AdapterInfo:
        info = AdapterInfo(next(self._numbers), adapter.adapter_id, adapter.num_pages, adapter.path)
        if info.name in self._reserved:
            raise OptionError(
                f"--lora-adapters: {info.name!r} is the name of the base model; choose another: NAME=PATH"
            )
        self._names[info.name] = info
        self._steps.scheduler.adapters.add(info)
        return info

    def labels(self) -> dict[str, str]:
        """Which adapters run and wait, for the metrics."""
        scheduler, names = self._steps.scheduler, {info.number: info.name for info in self._known}
        running, waiting = (
            [names[entry.request.adapter] for entry in entries if entry.request.adapter]
            for entries in (scheduler.running, scheduler.waiting())
        )
        return adapter_labels(len(self._names), running, waiting)

    @property
    def _known(self) -> list[AdapterInfo]:
        """Those that are being unloaded, too."""
        return list(self._steps.scheduler.adapters.known.values())

    async def load(self, name: str, source: str, revision: str | None = None) -> AdapterInfo:
        """AdapterRefused."""
        rules = self._check(name)
        rules.check(source)
        if name in self._names:
            raise AdapterRefused(f"`lora_name`: an adapter {name!r} is already loaded; unload it first", 409)
        if not name or name in self._reserved or len(name) > 256:
            raise AdapterRefused(f"`lora_name`: {name!r} cannot be the name of an adapter")
        self._changing.add(name)
        try:
            folder = await asyncio.to_thread(_folder, AdapterSource(name, source, revision), rules.cache)
            found = await self._shards.load_adapter(name, str(folder))
            info = self._add(found)
        except ShardsLost as error:
            raise AdapterRefused(f"{error}: the adapter was not loaded", 503) from None
        except (AdapterFailed, ModelError) as error:
            raise AdapterRefused(str(error)) from None
        finally:
            self._changing.discard(name)
        logger.info("Adapter loaded", extra={"fields": {"adapter": name, "path": info.path, "number": info.number}})
        self.on_change()
        return info

    async def unload(self, name: str) -> None:
        """When its last request has ended. AdapterRefused."""
        self._check(name)
        info = self._names.pop(name, None)
        if info is None:
            raise AdapterRefused(f"`lora_name`: no adapter {name!r} is loaded", 404)
        self._changing.add(name)
        self.on_change()
        try:
            while self._requests_with(info) or name in self._steps.placing:
                await asyncio.sleep(LOOK_SECONDS)
            scheduler = self._steps.scheduler
            scheduler.adapters.unload(info.number, scheduler.tree, scheduler.pool)
            with suppress(ShardsLost):  # those that take their place will not have it
                await self._shards.unload_adapter(name)
        finally:
            self._changing.discard(name)
        logger.info("Adapter unloaded", extra={"fields": {"adapter": name, "number": info.number}})

    async def restore(self, shards: GrpcShards) -> None:
        """New shards have what the command line says: they get what was loaded since, and lose what was unloaded. An
        adapter that cannot be read any more ends the requests that need it."""
        there = {adapter.adapter_id: adapter for adapter in (await shards.info()).adapters}
        known = self._known
        for name in there.keys() - {info.name for info in known}:
            await shards.unload_adapter(name)
        for info in known:
            try:
                found = there.get(info.name)
                if found is None or found.path != info.path:
                    found = await shards.load_adapter(info.name, info.path)
                if found.num_pages != info.num_pages:
                    raise AdapterFailed(f"{info.path} has changed since it was loaded")
            except AdapterFailed as error:
                self._lose(info, str(error))

    @property
    def _shards(self) -> GrpcShards:
        shards = self._steps.shards
        assert isinstance(shards, GrpcShards), "adapters are changed in real shards"
        return shards

    def _check(self, name: str) -> AdapterRules:
        if self._rules is None:
            raise AdapterRefused(
                "adapters cannot be changed at run time: start the server with --lora-allow-runtime", 403
            )
        if name in self._changing:
            raise AdapterRefused(f"`lora_name`: adapter {name!r} is being loaded or unloaded", 409)
        return self._rules

    def _requests_with(self, info: AdapterInfo) -> list[int]:
        return [request.id for request in self._steps.scheduler.requests if request.adapter == info.number]

    def _lose(self, info: AdapterInfo, reason: str) -> None:
        logger.error("Adapter %s cannot be loaded by the new shards: %s", info.name, reason)
        for request_id in self._requests_with(info):
            self._steps.end(request_id, Output(error=f"the adapter {info.name!r} is lost: {reason}"))
        self._names.pop(info.name, None)
        scheduler = self._steps.scheduler
        del scheduler.adapters.known[info.number]
        self.on_change()


def _folder(source: AdapterSource, cache: str | None) -> Path:
    """Downloaded, and looked at before any shard does."""
    folder = locate_adapter(source, cache)
    read_config(folder)
    weights_file(folder)
    return folder
