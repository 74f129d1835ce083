"""The pages of LoRA adapters on the device, and the offsets of each layer's matrices in a page."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PAGE_RANKS = 8
MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class LoraPlace:
    """Where a layer's matrices are in a page: A as [PAGE_RANKS, parts, experts, in], B as [PAGE_RANKS, experts, out].

    Parts are products with the same input whose outputs stand side by side, as q, k and v: each has an A of its own.
    """

    index: int  # of the layer in `LoraPages.ranks`
    a_begin: int
    b_begin: int
    in_features: int
    out_sizes: tuple[int, ...]  # of each part
    num_experts: int = 1

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)

    @property
    def num_parts(self) -> int:
        return len(self.out_sizes)

    @property
    def a_size(self) -> int:
        return PAGE_RANKS * self.num_parts * self.num_experts * self.in_features

    @property
    def b_size(self) -> int:
        return PAGE_RANKS * self.num_experts * self.out_features


@dataclass(frozen=True, slots=True)
class LoraPages:
    """The adapters on the device. Slot number `num_slots` stands for none."""

    pages: Tensor  # [num_pages, page_size]
    table: Tensor  # [num_slots + 1, max_pages] int32: the pages of each slot
    ranks: Tensor  # [layers, num_slots + 1] int32: 0 where an adapter does not change a layer

    @property
    def num_slots(self) -> int:
        return self.table.shape[0] - 1

    @property
    def max_rank(self) -> int:
        return self.table.shape[1] * PAGE_RANKS
