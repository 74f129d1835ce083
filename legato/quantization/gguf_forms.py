"""GGUF blocks in the forms that kernels multiply: 4-bit codes, 8-bit codes and int8 numbers, in groups of 16 or 32.

    Q4_0           4 bits   32   (code - 8) · scale             Q3_K    4 bits   16   the same
    Q4_1, Q4_K     4 bits   32   code · scale + minimum         Q2_K    4 bits   16   the same
    Q5_1, Q5_K     8 bits   32   code · scale + minimum
    Q5_0, Q8_0     int8     32   number · scale                 Q6_K    int8     16   the same

Codes are the file's. So are scales and minima of types whose blocks have 32 numbers; those of K types are products of
the block's scale and an integer, of 17 bits, and are rounded to float16: by 2 ** -11 at most, as numbers are that a
float16 model multiplies. Everything is computed where the blocks are, on the device as a rule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from legato.modelfiles.gguf.file import GgmlType
from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix

SCALE_DTYPE = torch.float16


def packed_matrix(blocks: torch.Tensor, ggml_type: GgmlType) -> QuantizedMatrix:
    """blocks [out, blocks in a row, bytes of a block] uint8, of a type that `FORMS` has."""
    assert blocks.shape[2] == ggml_type.block_bytes, (blocks.shape, ggml_type)
    return FORMS[ggml_type](blocks)


def _integers(
    codes: torch.Tensor, bits: int, scale: torch.Tensor, minimum: torch.Tensor | None = None
) -> GroupedIntegers:
    """codes [out, groups, columns of a group], scale and minimum [out, groups]"""
    columns = ColumnGroups.regular(codes.shape[1] * codes.shape[2], codes.shape[2])
    return GroupedIntegers.of(codes.flatten(1), bits, scale, None, columns, minimum)


def _numbers(numbers: torch.Tensor, scale: torch.Tensor) -> ScaledMatrix:
    """[out, groups, columns of a group] int8"""
    columns = ColumnGroups.regular(numbers.shape[1] * numbers.shape[2], numbers.shape[2])
    return ScaledMatrix(columns, scale, numbers.flatten(1).contiguous())


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """The float16 number at byte `place` of each block, [out, blocks in a row, 1]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)


def _product(scale: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """[out, blocks in a row, 1] and [out, blocks in a row, groups of a block] -> [out, groups]"""
    return (scale.float() * integers.float()).to(SCALE_DTYPE).flatten(1)


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1)


def _five_bits(fifth: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """As `_nibbles`, with bit i of the 32-bit word `fifth` on top of code i."""
    bits = fifth[..., None] >> torch.arange(8, dtype=torch.uint8, device=fifth.device) & 1
    return _nibbles(pairs) | bits.flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> QuantizedMatrix:
    return _integers(_nibbles(blocks[..., 2:]), 4, _half(blocks, 0).flatten(1))


def _q4_1(blocks: torch.Tensor) -> QuantizedMatrix:
    return _integers(_nibbles(blocks[..., 4:]), 4, _half(blocks, 0).flatten(1), _half(blocks, 2).flatten(1))


def _q5_0(blocks: torch.Tensor) -> QuantizedMatrix:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:])
    return _numbers(codes.to(torch.int8) - 16, _half(blocks, 0).flatten(1))


def _q5_1(blocks: torch.Tensor) -> QuantizedMatrix:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:])
    return _integers(codes, 5, _half(blocks, 0).flatten(1), _half(blocks, 2).flatten(1))


def _q8_0(blocks: torch.Tensor) -> QuantizedMatrix:
    return _numbers(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0).flatten(1))


def _planes(quants: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., bytes] -> [..., 8 / bits, bytes]: the lowest bits of all bytes, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
    return quants[..., None, :] >> shifts[:, None] & ((1 << bits) - 1)


def _q2_k(blocks: torch.Tensor) -> QuantizedMatrix:
    codes = _planes(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    both = blocks[..., :16]
    scale, minimum = _product(_half(blocks, 80), both & 15), _product(-_half(blocks, 82), both >> 4)
    return _integers(codes.reshape(len(blocks), -1, 16), 4, scale, minimum)


def _q3_k(blocks: torch.Tensor) -> QuantizedMatrix:
    low = _planes(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2)  # [out, blocks, 8, 32]
    codes = (low | _planes(blocks[..., :32], 1) << 2) + 4  # 4 is taken away, and the middle of 4 bits is 8
    # Sixteen 6-bit scales: the low halves of eight bytes, the high ones, and above them two bits of the last four.
    scales = _nibbles(blocks[..., 96:104]) | _planes(blocks[..., 104:108], 2).flatten(-2) << 4
    return _integers(codes.reshape(len(blocks), -1, 16), 4, _product(_half(blocks, 108), scales.int() - 32))


def _q4_k(blocks: torch.Tensor) -> QuantizedMatrix:
    codes = _planes(blocks[..., 16:].unflatten(-1, (4, 32)), 4)
    return _integers(codes.reshape(len(blocks), -1, 32), 4, *_scales_and_minima(blocks))


def _q5_k(blocks: torch.Tensor) -> QuantizedMatrix:
    low = _planes(blocks[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    codes = low | _planes(blocks[..., 16:48], 1) << 4
    return _integers(codes.reshape(len(blocks), -1, 32), 5, *_scales_and_minima(blocks))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the eight groups of a block of Q4_K and Q5_K; the bits are explained in `gguf.py`."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1)
    return _product(_half(blocks, 0), scales), _product(-_half(blocks, 2), minima)


def _q6_k(blocks: torch.Tensor) -> QuantizedMatrix:
    # Of each half of a block 64 bytes have the low bits of four groups of 32, and 32 bytes the high ones.
    low = _planes(blocks[..., :128].unflatten(-1, (2, 64)), 4).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = _planes(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
    numbers = (low | high << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _numbers(numbers.reshape(len(blocks), -1, 16), _product(_half(blocks, 208), scales))


FORMS: dict[GgmlType, Callable[[torch.Tensor], QuantizedMatrix]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
