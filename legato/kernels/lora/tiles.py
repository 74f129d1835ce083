"""Groups rows into tiles by LoRA adapter: computed once per step, read by the kernels of all layers.

How many tiles there are is known on the device alone. There may be as many as rows or slots; mostly there are far
fewer. Kernels are launched for some of them, and a program goes on with the next ones until there are no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from legato.kernels.grouped_linear import Groups, find_tile
from legato.kernels.language import Pointer, Scalar, constexpr, jit, padded, tl
from legato.kernels.overlap import launch_options, wait_for_previous

# Programs along the tiles, at most, of few rows and of many.
MOST_PROGRAMS, MANY_ROWS = 64, 1024


@dataclass(frozen=True, slots=True, eq=False)
class LoraGroups:
    """`rows` are grouped by slot, or by slot * num_experts + expert."""

    rows: Groups
    _tiles: dict[int, Tensor] = field(default_factory=dict)  # by their rows

    @property
    def num_rows(self) -> int:
        return self.rows.ids.numel()

    def most_tiles(self, block_m: int) -> int:
        """Every group that can have a row has one, and all other rows fill tiles of their own."""
        most_used = min(self.rows.num_experts, self.num_rows)
        return most_used + (self.num_rows - most_used) // block_m

    def num_programs(self, block_m: int) -> int:
        return min(self.most_tiles(block_m), MOST_PROGRAMS if self.num_rows <= MANY_ROWS else 2 * MOST_PROGRAMS)

    def tiles(self, block_m: int) -> Tensor:
        """[1 + most_tiles, 3] int32: the number of tiles, then of each of them the group, its first place in the order
        and where the group's places end."""
        if block_m not in self._tiles:
            starts, most = self.rows.starts, self.most_tiles(block_m)
            found = torch.empty(1 + most, 3, dtype=torch.int32, device=starts.device)
            _tiles_kernel[(most,)](
                found, starts, NUM_GROUPS=self.rows.num_experts, BLOCK_M=block_m, num_warps=4, **launch_options(starts)
            )
            self._tiles[block_m] = found
        return self._tiles[block_m]


@jit
def _tiles_kernel(
    found: Pointer, starts: Pointer, NUM_GROUPS: constexpr, BLOCK_M: constexpr, OVERLAP: constexpr
) -> None:
    wait_for_previous(OVERLAP)
    tile = tl.program_id(0)
    group, first, last = find_tile(starts, tile, NUM_GROUPS, BLOCK_M)
    tl.store(found + 3 + 3 * tile, group)
    tl.store(found + 3 + 3 * tile + 1, first)
    tl.store(found + 3 + 3 * tile + 2, last)
    if tile == 0:
        g = tl.arange(0, padded(NUM_GROUPS))
        is_group = g < NUM_GROUPS
        begin = tl.load(starts + g, mask=is_group, other=0)
        end = tl.load(starts + g + 1, mask=is_group, other=0)
        tl.store(found, tl.sum(tl.cdiv(end - begin, BLOCK_M), axis=0))


@jit
def read_tile(tiles: Pointer, tile: Scalar) -> Scalar:
    """Its group, its first place, and where the group's places end."""
    here = tiles + 3 + 3 * tile
    return tl.load(here), tl.load(here + 1), tl.load(here + 2)
