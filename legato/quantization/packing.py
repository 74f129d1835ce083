"""Small integers in words: bit streams of checkpoints, and the order in which Legato keeps codes.

A checkpoint has a little-endian bit stream of int32 words along one dimension: value j of 32 has bits j·bits onwards,
and may continue in the next word.

Legato keeps codes of 2, 4 or 8 bits in bytes along the last dimension. Those of 4 bits are in units of 128: byte j of a
unit has value j in its lower half and value j + 64 in its upper half, so that a kernel which takes the lower halves of
some bytes, or the upper ones, has values that lie side by side. Those of 2 bits have the first value in the lowest
bits.
"""

from __future__ import annotations

import math

import torch

WORD = 32
# Values of 4 bits that share 64 bytes.
UNIT = 128


def word_unit(bits: int) -> tuple[int, int]:
    """The fewest values that fill whole words, and how many words they fill."""
    values = WORD // math.gcd(WORD, bits)
    return values, values * bits // WORD


def packed_len(count: int, bits: int) -> int:
    """Words of a stream of `count` values."""
    return -(-count * bits // WORD)


def unpack_words(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """int32 [..., words, ...] -> uint8 [..., count, ...] along `dim`."""
    offset = torch.arange(count, device=words.device) * bits
    word, shift = offset // WORD, (offset % WORD).int()
    shape = [1] * words.dim()
    shape[dim] = count
    values = words.index_select(dim, word) >> shift.view(shape)
    if WORD % bits:
        left = (WORD - shift).clamp(max=bits)  # bits of the value that are in its first word
        following = (word + 1).clamp(max=words.shape[dim] - 1)
        values &= ((1 << left) - 1).view(shape)
        values |= words.index_select(dim, following) << left.view(shape)
    return (values & ((1 << bits) - 1)).to(torch.uint8)


def unpack_padded_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Along the last dimension, where each word has 32 // bits whole values and the rest of its bits is unused."""
    shifts = torch.arange(WORD // bits, dtype=torch.int32, device=words.device) * bits
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count].to(torch.uint8)


def code_width(bits: int) -> int:
    """Bits that a code takes in memory: those of the next power of two."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [rows, count] -> uint8 [rows, bytes]. Beyond the last value there are zeros."""
    share = 8 // width
    if share == 1:
        return codes.contiguous()
    unit = UNIT if width == 4 else share
    if missing := -codes.shape[1] % unit:
        codes = torch.nn.functional.pad(codes, (0, missing))
    parts = codes.unflatten(1, (-1, share, unit // share))
    packed = parts[:, :, 0].clone()
    for place in range(1, share):
        packed |= parts[:, :, place] << (place * width)
    return packed.flatten(1)


def pack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two in a byte and the first in its lower half, in the order of `pack_codes`."""
    return pack_codes(torch.stack((packed & 15, packed >> 4), dim=2).flatten(1), 4)


def unpack_codes(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """uint8 [rows, bytes] -> uint8 [rows, count]."""
    share = 8 // width
    if share == 1:
        return packed
    mask = (1 << width) - 1
    units = packed.unflatten(1, (-1, UNIT // share if width == 4 else 1))
    parts = [(units >> (place * width)) & mask for place in range(share)]
    return torch.stack(parts, dim=2).flatten(1)[:, :count]
