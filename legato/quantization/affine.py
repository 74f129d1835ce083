"""GGUF's codes as they are, for CPUs: with a scale and a minimum for each 32 columns, and K types with 4 and 6 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from legato.modelfiles.gguf.file import GgmlType
from legato.quantization.gguf import Bytes, dequantize, scales_and_minima
from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import ScaledMatrix, computing_dtype

GROUP = 32
# Types whose blocks are read without expanding them to floats.
CODED = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0)
K_BLOCK = 256  # columns of a block of a K type


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
        wide = (
            _nibbles(self.codes).to(compute) * self.scale.to(compute)[..., None] + self.minimum.to(compute)[..., None]
        )
        return wide.flatten(1).to(dtype)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        assert len(places) == len(left) * GROUP, "columns are cut between groups"
        codes = self.codes.unflatten(1, (-1, GROUP // 2))[:, left].flatten(1).contiguous()
        scale, minimum = self.scale[:, left].contiguous(), self.minimum[:, left].contiguous()
        return replace(self, groups=groups, scale=scale, minimum=minimum, codes=codes)


@dataclass(frozen=True)
class KGroups(QuantizedMatrix):
    """Blocks of 256 columns, whose groups have integers in place of scales. In groups of 32 columns:

    4 bits    scale · first · code + minimum · second
    6 bits    scale · first · (code - 32), of the last 16 columns `second` instead of `first`
    """

    bits: int
    scale: torch.Tensor  # [out, blocks] float16
    minimum: torch.Tensor | None  # the same, of 4 bits
    first: torch.Tensor  # [out, blocks * 8] int8
    second: torch.Tensor
    codes: torch.Tensor  # uint8: of 4 bits as in `AffineGroups`, of 6 bits [out, in]

    @property
    def kind(self) -> str:
        return f"{self.bits}-bit integers, blocks of 256"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        compute = computing_dtype(dtype)
        scale, first, second = (
            each.to(compute) for each in (self.scale.repeat_interleave(8, 1), self.first, self.second)
        )
        if self.minimum is None:
            numbers = self.codes.unflatten(1, (-1, 2, GROUP // 2)).to(compute) - 32
            wide = numbers * (scale[..., None] * torch.stack((first, second), 2))[..., None]
        else:
            minimum = self.minimum.repeat_interleave(K_BLOCK // GROUP, 1).to(compute)
            wide = _nibbles(self.codes).to(compute) * (scale * first)[..., None] + (minimum * second)[..., None]
        return wide.flatten(1).to(dtype)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        assert len(places) == len(left) * K_BLOCK, "columns are cut between blocks"
        per_block = {
            name: tensor.unflatten(1, (self.scale.shape[1], -1)) for name, tensor in self._row_tensors().items()
        }
        return replace(self, groups=groups, **{name: tensor[:, left].flatten(1) for name, tensor in per_block.items()})


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[out, groups * 16] -> [out, groups, 32]"""
    pairs = codes.unflatten(1, (-1, GROUP // 2))
    return torch.cat((pairs & 15, pairs >> 4), dim=2)


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
    if ggml_type in (GgmlType.Q4_K, GgmlType.Q6_K):
        return (_read_q4_k if ggml_type == GgmlType.Q4_K else _read_q6_k)(flat, rows)
    return dequantize(flat, ggml_type, (rows, columns))


def _read_q4_k(flat: Bytes, rows: int) -> KGroups:
    """32 bytes hold two groups, one in the low halves and one in the high ones."""
    scales, minima = (torch.from_numpy(each.view(np.int8).reshape(rows, -1)) for each in scales_and_minima(flat))
    pairs = flat[:, 16:].reshape(-1, 4, 1, 2, 16)
    low, high = pairs & 15, pairs >> 4
    numbers = np.concatenate((low, high), axis=2)  # [blocks, 4, 2 groups, 2 halves, 16]
    codes = torch.from_numpy((numbers[..., 0, :] | numbers[..., 1, :] << 4).reshape(rows, -1))
    groups = ColumnGroups.regular(2 * codes.shape[1], K_BLOCK)
    return KGroups(groups, 4, _halves(flat[:, :2], rows), -_halves(flat[:, 2:4], rows), scales, minima, codes)


def _read_q6_k(flat: Bytes, rows: int) -> KGroups:
    """Each half of a block has the low bits of four groups in 64 bytes and the high ones in 32."""
    low, high = flat[:, :128].reshape(-1, 2, 2, 32), flat[:, 128:192].reshape(-1, 2, 32)
    numbers = np.empty((len(flat), 2, 4, 32), np.uint8)
    for group in range(4):
        numbers[:, :, group] = low[:, :, group % 2] >> 4 * (group // 2) & 15 | (high >> 2 * group & 3) << 4
    codes = torch.from_numpy(numbers.reshape(rows, -1))
    scales = torch.from_numpy(np.ascontiguousarray(flat[:, 192:208]).view(np.int8).reshape(rows, -1, 2))
    first, second = scales.unbind(2)
    groups = ColumnGroups.regular(codes.shape[1], K_BLOCK)
    return KGroups(groups, 6, _halves(flat[:, 208:210], rows), None, first.contiguous(), second.contiguous(), codes)


def coded_like(dense: torch.Tensor, ggml_type: GgmlType) -> QuantizedMatrix | None:
    """What `read_codes` makes of a matrix of these sizes, without its numbers; None if that is floats or int8."""
    rows, columns = dense.shape

    def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
        return dense.new_empty(rows, width, dtype=dtype)

    if ggml_type in (GgmlType.Q4_0, GgmlType.Q4_1):
        scale = empty(columns // GROUP, torch.float16)
        return AffineGroups(ColumnGroups.regular(columns, GROUP), scale, scale, empty(columns // 2, torch.uint8))
    if ggml_type not in (GgmlType.Q4_K, GgmlType.Q6_K):
        return None
    is_4 = ggml_type == GgmlType.Q4_K
    scale, integers = empty(columns // K_BLOCK, torch.float16), empty(columns // GROUP, torch.int8)
    codes = empty(columns // 2 if is_4 else columns, torch.uint8)
    groups = ColumnGroups.regular(columns, K_BLOCK)
    return KGroups(groups, 4 if is_4 else 6, scale, scale if is_4 else None, integers, integers, codes)


def _halves(spelled: Bytes, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(spelled).view(np.float16).reshape(rows, -1).copy())
