"""LoRA adapters in the layers of a model: the adapters on the device, their rows in a forward pass, and the sum.

A layer that adapters may change has a `LoraDelta` (`attach`, in `models/targets.py`). In a forward none of whose rows
has an adapter it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from legato.kernels.grouped_linear import group_rows
from legato.kernels.lora.pages import PAGE_RANKS, LoraPages, LoraPlace
from legato.kernels.lora.product import gather_ranks, lora_add, lora_expand
from legato.kernels.lora.tiles import LoraGroups


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter in host memory, as this shard needs it: cut, scaled and in pages."""

    name: str
    pages: torch.Tensor  # [num_pages, page_size], pinned where there is a GPU
    ranks: torch.Tensor  # [layers] int32

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]


class RowSlots:
    """The adapter of each row that a layer sees. The groups are made once, by the first layer."""

    def __init__(self, slots: torch.Tensor, num_slots: int) -> None:
        self.slots = slots  # [T] int64; `num_slots`: none
        self.num_slots = num_slots

    @cached_property
    def groups(self) -> LoraGroups:
        return LoraGroups(group_rows(self.slots[:, None].contiguous(), self.num_slots))

    def by_expert(self, ids: torch.Tensor, num_experts: int) -> LoraGroups:
        """ids [T, k] int64, the experts of each row."""
        none = self.num_slots * num_experts
        combined = (self.slots[:, None] * num_experts + ids).clamp_(max=none)
        return LoraGroups(group_rows(combined.contiguous(), none))


class DeviceAdapters:
    """The pages of all adapters on the device, and the rows of the forward that is being computed.

    Slots and pages are numbers that the router chooses, like rows and blocks.
    """

    def __init__(
        self, num_pages: int, max_pages: int, page_size: int, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`max_pages` is the most that one adapter has."""
        self.on_device = LoraPages(
            torch.zeros(num_pages, page_size, dtype=dtype, device=device),
            torch.zeros(num_pages + 1, max_pages, dtype=torch.int32, device=device),
            torch.zeros(num_layers, num_pages + 1, dtype=torch.int32, device=device),
        )
        self.rows: RowSlots | None = None  # None: no row of this forward has an adapter

    @property
    def none(self) -> int:
        """The slot of rows without an adapter."""
        return self.on_device.num_slots

    @property
    def num_pages(self) -> int:
        return self.on_device.pages.shape[0]

    def place(self, adapter: HostAdapter, slot: int, pages: Sequence[int]) -> None:
        """Bring an adapter into a slot, behind the steps that were launched before."""
        assert len(pages) == adapter.num_pages, f"{adapter.name} has {adapter.num_pages} pages"
        there = self.on_device
        for source, page in zip(adapter.pages, pages, strict=True):
            there.pages[page].copy_(source, non_blocking=True)
        numbers = torch.tensor(pages, dtype=torch.int32)
        if there.table.is_cuda:  # so that the copy is queued and not waited for
            numbers = numbers.pin_memory()
        there.table[slot, : len(pages)] = numbers.to(there.table.device, non_blocking=True)
        there.ranks[:, slot] = adapter.ranks.to(there.ranks.device, non_blocking=True)

    def pretend(self, slot: int, is_there: bool) -> None:
        """For warm-up: an adapter of the largest rank, made of whatever the first pages hold."""
        there = self.on_device
        count = min(there.table.shape[1], self.num_pages)
        there.table[slot, :count] = torch.arange(count, dtype=torch.int32, device=there.table.device)
        there.ranks[:, slot] = count * PAGE_RANKS if is_there else 0

    def begin(self, slots: torch.Tensor | None) -> None:
        """Of the rows that follow: [T] int64, or None if none of them has an adapter."""
        self.rows = None if slots is None else RowSlots(slots, self.none)


class StepAdapters:
    """The adapters of a step's tokens. `narrow` is for the last layer, which goes on with fewer of them."""

    def __init__(self, device: DeviceAdapters, slots: torch.Tensor) -> None:
        self.slots = slots  # [T] int64
        self._device = device
        self._tokens = RowSlots(slots, device.none)
        self._wanted: RowSlots | None = None

    def begin(self) -> None:
        self._device.rows = self._tokens

    def narrow(self, indices: torch.Tensor | None) -> None:
        """Only these tokens from now on; None: all."""
        if indices is None:
            self._device.rows = self._tokens
            return
        if self._wanted is None:
            self._wanted = RowSlots(self.slots[indices], self._device.none)
        self._device.rows = self._wanted

    def use(self, first: int, last: int) -> None:
        """For the logits of some of the tokens."""
        self._device.begin(self.slots[first:last])


class LoraDelta:
    """What adapters add to one layer."""

    def __init__(self, device: DeviceAdapters, place: LoraPlace) -> None:
        self._device = device
        self._place = place

    @property
    def is_active(self) -> bool:
        return self._device.rows is not None

    def add(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """product [T, out], or parts [p, T, out] of one, whose sum grows by as much if the first does."""
        rows = self._device.rows
        if rows is not None:
            whole = product[0] if product.dim() == 3 else product
            lora_add(whole, x, rows.groups, self._device.on_device, self._place)
        return product

    def add_experts(
        self, product: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """product [T k, out]; `ids` [T, k] are the experts; `scale` [T k] multiplies what is added."""
        rows = self._device.rows
        if rows is not None:
            groups = rows.by_expert(ids, self._place.num_experts)
            lora_add(product, x, groups, self._device.on_device, self._place, scale)
        return product

    def look_up(self, found: torch.Tensor, ids: torch.Tensor, foreign: torch.Tensor | None = None) -> torch.Tensor:
        """For embeddings: found [T, hidden]; `foreign` [T] are tokens that another shard looks up."""
        rows = self._device.rows
        if rows is not None:
            shrunk = gather_ranks(ids, rows.slots, self._device.on_device, self._place)
            if foreign is not None:
                shrunk.masked_fill_(foreign[:, None], 0.0)
            lora_expand(found, shrunk, rows.groups, self._device.on_device, self._place)
        return found
