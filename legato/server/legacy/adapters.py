"""LoRA adapters of TGI's unary calls: the shard chooses their slots itself, as Legato's router does for steps."""

from __future__ import annotations

import itertools

import grpc

from legato.layers.lora import HostAdapter
from legato.pb import generate_pb2 as pb
from legato.scheduling.adapters import AdapterInfo, AdapterSlots, Placement
from legato.server.adapters import ShardAdapters, UnknownAdapter
from legato.server.interceptor import RequestRefused
from legato.server.legacy.batch import Member


class UnaryAdapters:
    """`adapters` is None in a shard that takes none: then a request that names one is refused."""

    def __init__(self, adapters: ShardAdapters | None) -> None:
        self._adapters = adapters
        self._slots = AdapterSlots(0 if adapters is None else adapters.device.num_pages)
        self._numbers: dict[str, tuple[HostAdapter, int]] = {}
        self._ids = itertools.count(1)
        self._placements: list[Placement] = []

    def hold(self, member: Member) -> None:
        """Before the step that brings it in. RequestRefused if nothing of that name is loaded, or there is no room."""
        if not (name := member.request.adapter_id):
            return
        if self._adapters is None:
            raise UnknownAdapter(name)
        loaded = self._adapters[name]
        known, number = self._numbers.get(name, (None, 0))
        if known is not loaded:  # loaded for the first time, or anew
            number = next(self._ids)
            self._numbers[name] = (loaded, number)
            self._slots.add(AdapterInfo(number, name, loaded.num_pages))
        if not self._slots.has_room(number):
            raise RequestRefused(f"no room for adapter {name!r} on the device", grpc.StatusCode.RESOURCE_EXHAUSTED)
        placement = self._slots.hold(number)
        if placement is not None:
            self._placements.append(placement)
        member.adapter = number

    def slot(self, member: Member) -> int:
        return self._slots.residents[member.adapter].slot if member.adapter else 0

    def release(self, member: Member) -> None:
        self._slots.release(member.adapter)
        member.adapter = 0

    def take_placements(self) -> list[pb.AdapterPlacement]:
        taken, self._placements = self._placements, []
        return [pb.AdapterPlacement(adapter_id=each.name, slot=each.slot, pages=each.pages) for each in taken]
