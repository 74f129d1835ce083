"""4-bit codes with a scale and a minimum for each 32 columns, as GGUF's Q4_0, Q4_1 and Q4_K have them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from legato.modelfiles.gguf.file import GgmlType
from legato.quantization.gguf import Bytes, Floats, dequantize, floats, scales_and_minima
from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import ScaledMatrix, computing_dtype

GROUP = 32
# Types whose blocks are read without expanding them to floats.
CODED = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q8_0)


@dataclass(frozen=True)
class AffineGroups(QuantizedMatrix):
    """scale · code + minimum, codes from 0 to 15."""

    scale: torch.Tensor  # [out, groups] float16
    minimum: torch.Tensor  # [out, groups] float16
    codes: torch.Tensor  # [out, groups * 16] uint8: in a group the low halves of all bytes, then the high ones

    @property
    def kind(self) -> str:
        return "4-bit integers with minima, groups of 32"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        compute = computing_dtype(dtype)
        pairs = self.codes.unflatten(1, (-1, GROUP // 2))
        numbers = torch.cat((pairs & 15, pairs >> 4), dim=2).to(compute)
        wide = numbers * self.scale.to(compute)[..., None] + self.minimum.to(compute)[..., None]
        return wide.flatten(1).to(dtype)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        assert len(places) == len(left) * GROUP, "columns are cut between groups"
        codes = self.codes.unflatten(1, (-1, GROUP // 2))[:, left].flatten(1).contiguous()
        scale, minimum = self.scale[:, left].contiguous(), self.minimum[:, left].contiguous()
        return replace(self, groups=groups, scale=scale, minimum=minimum, codes=codes)


def read_codes(blocks: Bytes, ggml_type: GgmlType) -> QuantizedMatrix | torch.Tensor:
    """[out, blocks in a row, block_bytes] of a GGUF matrix: codes where the type is one of `CODED`, else floats."""
    rows, per_row, _ = blocks.shape
    columns = per_row * ggml_type.block_size
    groups = ColumnGroups.regular(columns, GROUP)
    flat = blocks.reshape(rows * per_row, -1)
    if ggml_type == GgmlType.Q8_0:
        numbers = np.ascontiguousarray(flat[:, 2:]).view(np.int8)
        if numbers.min(initial=0) > -128:
            scale = _halves(flat[:, :2], rows)
            return ScaledMatrix(groups, scale, torch.from_numpy(numbers.reshape(rows, columns).copy()))
    if ggml_type in (GgmlType.Q4_0, GgmlType.Q4_1):
        scale = _halves(flat[:, :2], rows)
        has_minimum = ggml_type == GgmlType.Q4_1
        minimum = _halves(flat[:, 2:4], rows) if has_minimum else scale * -8
        codes = np.ascontiguousarray(flat[:, 4 if has_minimum else 2 :]).reshape(rows, -1)
        return AffineGroups(groups, scale, minimum, torch.from_numpy(codes.copy()))
    if ggml_type == GgmlType.Q4_K:
        return _read_q4_k(flat, rows, groups)
    return dequantize(flat, ggml_type, (rows, columns))


def _read_q4_k(flat: Bytes, rows: int, groups: ColumnGroups) -> AffineGroups:
    """32 bytes hold two groups, one in the low halves and one in the high ones."""
    scales, minima = scales_and_minima(flat)
    pairs = flat[:, 16:].reshape(-1, 4, 1, 2, 16)
    low, high = pairs & 15, pairs >> 4
    numbers = np.concatenate((low, high), axis=2)  # [blocks, 4, 2 groups, 2 halves, 16]
    codes = numbers[..., 0, :] | numbers[..., 1, :] << 4
    return AffineGroups(
        groups,
        _half((floats(flat, 0, 2) * scales).reshape(rows, -1)),
        _half((floats(flat, 2, 4) * -minima.astype(np.float32)).reshape(rows, -1)),
        torch.from_numpy(codes.reshape(rows, -1)),
    )


def _half(numbers: Floats) -> torch.Tensor:
    return torch.from_numpy(numbers).half()


def _halves(spelled: Bytes, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(spelled).view(np.float16).reshape(rows, -1).copy())
