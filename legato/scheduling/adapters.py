"""LoRA adapters as the scheduler sees them: numbers, their size in pages, and which of them are on the device.

An adapter gets a new number whenever it is loaded, so that nothing computed with an earlier one of the same name is
taken for its own. Those on the device have a slot and pages; a running request holds its adapter there, and what nobody
holds makes room for others, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from legato.scheduling.blocks import BlockPool
    from legato.scheduling.prefix_tree import PrefixTree
    from legato.scheduling.state import Admission

NO_ADAPTER = 0
# Seconds for which a request that waits for room for its adapter is overtaken by others. Then nobody behind it gets in.
ADAPTER_PATIENCE = 2.0


class AdapterInfo(Struct, frozen=True, array_like=True):
    """An adapter that requests may ask for."""

    number: int
    name: str
    num_pages: int
    # Where it came from, for people.
    path: str = ""


@dataclass(slots=True)
class Placement:
    """An adapter is brought to the device by the step that this is part of."""

    name: str
    slot: int
    pages: list[int]


@dataclass(slots=True)
class Resident:
    slot: int
    pages: list[int]
    num_users: int = 0
    # Whether a step that brought it has succeeded. One that fails may not have come so far.
    has_landed: bool = False


@dataclass(slots=True)
class AdapterSlots:
    num_pages: int
    known: dict[int, AdapterInfo] = field(default_factory=dict)
    residents: OrderedDict[int, Resident] = field(default_factory=OrderedDict)  # least recently used first
    free_pages: list[int] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset(self.num_pages)

    def reset(self, num_pages: int) -> None:
        """Nothing is on the device."""
        self.num_pages = num_pages
        self.residents.clear()
        # Every adapter has a page at least, so there are never more of them than pages.
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.free_slots = list(self.free_pages)

    def add(self, adapter: AdapterInfo) -> None:
        self.known[adapter.number] = adapter

    def remove(self, number: int) -> None:
        """Nobody holds it."""
        del self.known[number]
        if number in self.residents:
            self._evict(number)

    def unload(self, number: int, tree: PrefixTree, pool: BlockPool) -> None:
        """Forget it and what was computed with it. No request asks for it any more."""
        self.remove(number)
        pool.free(tree.drop(number))

    def has_room(self, number: int) -> bool:
        """Whether `hold` would succeed."""
        if number == NO_ADAPTER or number in self.residents:
            return True
        unused = sum(len(each.pages) for each in self.residents.values() if not each.num_users)
        return self.known[number].num_pages <= len(self.free_pages) + unused

    def hold(self, number: int) -> Placement | None:
        """One more request runs with it. Returns how it is brought to the device, unless it is there."""
        resident = self.residents.get(number)
        placement = None
        if resident is None:
            adapter = self.known[number]
            while len(self.free_pages) < adapter.num_pages:
                self._evict(next(each for each, there in self.residents.items() if not there.num_users))
            pages = [self.free_pages.pop() for _ in range(adapter.num_pages)]
            resident = self.residents[number] = Resident(self.free_slots.pop(), pages)
            placement = Placement(adapter.name, resident.slot, pages)
        resident.num_users += 1
        self.residents.move_to_end(number)
        return placement

    def is_overtaken(self, number: int, waited: float) -> bool:
        """Whether others go first: it has no room, and has waited for less than `ADAPTER_PATIENCE` seconds."""
        return waited <= ADAPTER_PATIENCE and not self.has_room(number)

    def admit(self, admission: Admission, placements: list[Placement]) -> Admission:
        """A request enters a row: `hold` its adapter, if it has one, and tell the shards."""
        number = admission.request.adapter
        if number == NO_ADAPTER:
            return admission
        placement, name, resident = self.hold(number), self.known[number].name, self.residents[number]
        if placement is None and not resident.has_landed:  # a step in flight brings it, or one that failed did not
            placement = Placement(name, resident.slot, resident.pages)
        if placement is not None and all(each.pages is not placement.pages for each in placements):
            placements.append(placement)
        admission.adapter_name, admission.adapter_slot = name, resident.slot
        return admission

    def land(self, placements: Sequence[Placement]) -> None:
        """A step with these has succeeded."""
        for placement in placements:
            for resident in self.residents.values():
                if resident.pages is placement.pages:  # and not one that has come to the same place since
                    resident.has_landed = True

    def release(self, number: int) -> None:
        if number == NO_ADAPTER:
            return
        resident = self.residents[number]
        assert resident.num_users > 0, "released more often than held"
        resident.num_users -= 1

    def _evict(self, number: int) -> None:
        resident = self.residents.pop(number)
        assert not resident.num_users, "an adapter that is in use"
        self.free_pages += resident.pages
        self.free_slots.append(resident.slot)
