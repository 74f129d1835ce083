"""GGUF blocks to float32.

A quantised row is a string of blocks: a few scales and many small integers. Each decoder below turns `n` blocks,
`[n, block_bytes]` of uint8, into `[n, block_size]` of float32 that it writes into `out`. Two families:

    Q4_0 … Q8_0    32 numbers:  x = d·q          or, for the _1 types, x = d·q + m
    Q2_K … Q8_K   256 numbers in sub-blocks of 16 or 32, whose own scales are integers times the block's d

Decoding runs over a few thousand blocks at a time, so that everything between the bytes read and the floats written
stays in the processor's cache; it is then about as fast as filling memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from legato.common.errors import UnsupportedModel
from legato.modelfiles.gguf.file import GgmlType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

NUMBERS_AT_ONCE = 1 << 18


def dequantize(raw: Bytes, ggml_type: GgmlType, shape: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor of `shape` from the bytes of a GGUF tensor. Never aliases `raw`."""
    decode = _DECODERS.get(ggml_type)
    if decode is None:
        known = ", ".join(known_type.name for known_type in _DECODERS)
        raise UnsupportedModel(f"GGUF tensors of type {ggml_type.name} are not supported; Legato reads {known}")
    size, nbytes = ggml_type.block_size, ggml_type.block_bytes
    num_blocks = math.prod(shape) // size
    assert raw.nbytes == num_blocks * nbytes, (raw.nbytes, ggml_type, shape)
    blocks = raw.reshape(num_blocks, nbytes)
    out = np.empty((num_blocks, size), dtype=np.float32)
    step = NUMBERS_AT_ONCE // size
    for begin in range(0, num_blocks, step):
        decode(blocks[begin : begin + step], out[begin : begin + step])
    return torch.from_numpy(out).view(shape)


def floats(blocks: Bytes, begin: int, end: int, dtype: str = "<f2") -> Floats:
    """The numbers that bytes `begin:end` of every block spell, `[n, count]`."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype).astype(np.float32)


def _decode_f32(blocks: Bytes, out: Floats) -> None:
    out.view(np.uint8)[:] = blocks


def _decode_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = np.ascontiguousarray(blocks).view("<f2")


def _decode_bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = np.ascontiguousarray(blocks).view("<u2")
    bits <<= 16


def _decode_q4_0(blocks: Bytes, out: Floats) -> None:
    _spread_nibbles(blocks[:, 2:], out)
    out -= 8
    out *= floats(blocks, 0, 2)


def _decode_q4_1(blocks: Bytes, out: Floats) -> None:
    _spread_nibbles(blocks[:, 4:], out)
    out *= floats(blocks, 0, 2)
    out += floats(blocks, 2, 4)


def _decode_q5_0(blocks: Bytes, out: Floats) -> None:
    _spread_five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= floats(blocks, 0, 2)


def _decode_q5_1(blocks: Bytes, out: Floats) -> None:
    _spread_five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= floats(blocks, 0, 2)
    out += floats(blocks, 2, 4)


def _decode_q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= floats(blocks, 0, 2)


def _spread_nibbles(quants: Bytes, out: Floats) -> None:
    """16 bytes hold 32 numbers: the low halves come first, then the high halves."""
    out[:, :16] = quants & 15
    out[:, 16:] = quants >> 4


def _spread_five_bits(fifth: Bytes, quants: Bytes, out: Floats) -> None:
    """As `_spread_nibbles`, with bit i of the 32-bit word `fifth` on top of number i."""
    high = np.unpackbits(fifth, axis=1, bitorder="little") << 4
    out[:, :16] = (quants & 15) | high[:, :16]
    out[:, 16:] = (quants >> 4) | high[:, 16:]


def _decode_q2_k(blocks: Bytes, out: Floats) -> None:
    scales, quants = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for plane in range(4):
        groups[:, :, plane] = (quants >> (2 * plane)) & 3
    sub = out.reshape(-1, 16, 16)
    sub *= (floats(blocks, 80, 82) * (scales & 15))[:, :, None]
    sub -= (floats(blocks, 82, 84) * (scales >> 4))[:, :, None]


def _decode_q3_k(blocks: Bytes, out: Floats) -> None:
    third, quants = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 32)
    groups = out.reshape(-1, 8, 32)
    for group in range(8):
        two_bits = (quants[:, group // 4] >> (2 * (group % 4))) & 3
        # The mask says where 4 is *not* taken away, so it is the third bit of the number plus 4.
        groups[:, group] = two_bits | ((third >> group) & 1) << 2
    out -= 4
    # Sixteen 6-bit scales in twelve bytes: byte i has the low halves of scales i and i + 8; the last four bytes
    # have the upper two bits, of scales j, j + 4, j + 8 and j + 12 in byte j.
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    scales |= np.concatenate([((high >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], axis=1)
    sub = out.reshape(-1, 16, 16)
    sub *= (floats(blocks, 108, 110) * (scales.astype(np.float32) - 32))[:, :, None]


def _decode_q4_k(blocks: Bytes, out: Floats) -> None:
    quants = blocks[:, 16:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 4, 2, 32)
    groups[:, :, 0] = quants & 15
    groups[:, :, 1] = quants >> 4
    _scale_and_shift(blocks, out)


def _decode_q5_k(blocks: Bytes, out: Floats) -> None:
    fifth, quants = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 8, 32)
    for group in range(8):
        nibble = (quants[:, group // 2] >> (4 * (group % 2))) & 15
        groups[:, group] = nibble | ((fifth >> group) & 1) << 4
    _scale_and_shift(blocks, out)


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """x = d·scale·q - dmin·min for the eight sub-blocks of Q4_K and Q5_K."""
    scales, mins = scales_and_minima(blocks)
    sub = out.reshape(-1, 8, 32)
    sub *= (floats(blocks, 0, 2) * scales)[:, :, None]
    sub -= (floats(blocks, 2, 4) * mins)[:, :, None]


def scales_and_minima(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Of the eight sub-blocks of Q4_K and Q5_K, `[n, 8]` each.

    Sixteen 6-bit numbers in the twelve bytes after d and dmin: of scales (first four) and mins (next four) 0..3 the low
    six bits; the last four bytes have the low halves of scales and mins 4..7, whose upper two bits top the first eight.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins


def _decode_q6_k(blocks: Bytes, out: Floats) -> None:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    groups = out.reshape(-1, 2, 4, 32)
    for group in range(4):
        nibble = (low[:, :, group % 2] >> (4 * (group // 2))) & 15
        groups[:, :, group] = nibble | ((high >> (2 * group)) & 3) << 4
    out -= 32
    sub = out.reshape(-1, 16, 16)
    sub *= (floats(blocks, 208, 210) * blocks[:, 192:208].view(np.int8))[:, :, None]


def _decode_q8_k(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 4:260].view(np.int8)
    out *= floats(blocks, 0, 4, "<f4")


_DECODERS: dict[GgmlType, Callable[[Bytes, Floats], None]] = {
    GgmlType.F32: _decode_f32,
    GgmlType.F16: _decode_f16,
    GgmlType.BF16: _decode_bf16,
    GgmlType.Q4_0: _decode_q4_0,
    GgmlType.Q4_1: _decode_q4_1,
    GgmlType.Q5_0: _decode_q5_0,
    GgmlType.Q5_1: _decode_q5_1,
    GgmlType.Q8_0: _decode_q8_0,
    GgmlType.Q2_K: _decode_q2_k,
    GgmlType.Q3_K: _decode_q3_k,
    GgmlType.Q4_K: _decode_q4_k,
    GgmlType.Q5_K: _decode_q5_k,
    GgmlType.Q6_K: _decode_q6_k,
    GgmlType.Q8_K: _decode_q8_k,
}
