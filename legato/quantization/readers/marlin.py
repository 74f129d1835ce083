"""Marlin files: symmetric 4-bit integers in the order in which Marlin's GPU kernel reads them.

P.B  [K/16, 2N] int32   tiles of 16 x 16, permuted within 1,024 codes
P.s  [K/G, N] fp16      permuted within 64 outputs, within 32 where there is one group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import GroupedIntegers
from legato.quantization.stored import MatrixSlice, StoredTensors, read_typed

TILE = 16
BITS = 4
# The nibble of a word that has value 0, 1, … of eight.
INTERLEAVE = (0, 2, 4, 6, 1, 3, 5, 7)


def code_order() -> torch.Tensor:
    """For each of 1,024 stored codes its place in four tiles, row by row."""
    order = []
    for lane in range(32):
        column, first = lane // 4, 2 * (lane % 4)
        rows = (first, first + 1, first + 8, first + 9)
        mine = [TILE * row + column + 8 * half for half in (0, 1) for row in rows]
        order += [place + TILE * TILE * tile for tile in range(4) for place in mine]
    return torch.tensor(order).view(-1, 8)[:, list(INTERLEAVE)].flatten()


def scale_order(is_grouped: bool) -> torch.Tensor:
    if is_grouped:
        return torch.arange(64).view(8, 8).t().flatten()
    return torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])


@dataclass(frozen=True)
class MarlinReader:
    group_size: int
    unread: tuple[str, ...] = (".workspace", ".g_idx")

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.B" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        name, num_outputs, num_inputs = wanted.name, wanted.out_features, wanted.in_features
        groups = ColumnGroups.regular(num_inputs, self.group_size)
        if num_inputs % TILE or num_outputs % 64 or num_inputs % groups.size:
            raise tensors.fault(
                f"{name}.B", f"cannot be a matrix {num_outputs} x {num_inputs}: not a multiple of 64 x 16"
            )
        stored = read_typed(tensors, f"{name}.B", (num_inputs // TILE, num_outputs * TILE // 8), torch.int32)
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=stored.device)
        codes = ((stored[..., None] >> shifts) & 15).to(torch.uint8).reshape(-1, 1024)
        codes = _unpermuted(codes, code_order())
        tiles = codes.reshape(num_inputs // TILE, num_outputs // TILE, TILE, TILE).permute(0, 2, 1, 3)
        codes = tiles.reshape(num_inputs, num_outputs).t()
        num_groups = num_inputs // groups.size
        scales = tensors.raw(f"{name}.s", (num_groups, num_outputs))
        order = scale_order(num_groups > 1)
        scales = _unpermuted(scales.reshape(-1, len(order)), order).reshape(num_groups, num_outputs)
        return wanted.of_whole(GroupedIntegers.of(codes, BITS, scales.t(), None, groups))


def _unpermuted(stored: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[n, len(order)]: column i of what is stored is column order[i] of the result."""
    return torch.empty_like(stored).index_copy_(1, order.to(stored.device), stored)
