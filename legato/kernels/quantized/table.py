"""Decodes 4-bit codes with a lookup table in instruction constants, without memory accesses.

Hopper's byte permutation picks four bytes of eight by four selectors of 3 bits. So four codes find the upper bytes of
their 16-bit numbers in a table of sixteen with two permutations, one for codes below 8 and one for others, and the
lower bytes with two more: three instructions for a number. Triton's interpreter and tests look the number up in memory.
"""

from __future__ import annotations

from functools import cache

import torch

from legato.kernels.language import Pointer, Scalar, constexpr, jit, tl


@cache
def lookup_code(table: tuple[float, ...]) -> str:
    """PTX that turns a word into eight float32 numbers: of the lower halves of its bytes, and then of the upper ones.
    The table is rounded to float16."""
    lines = [*_REGISTERS, ".reg .b16 even, odd;"]
    for half in range(2):
        lines += _bytes_of_numbers(table, torch.float16, "$8", half)
        for place, selector in enumerate((0x5140, 0x7362)):
            lines.append(f"prmt.b32 pair, low, high, {selector:#x};")
            lines.append("mov.b32 {even, odd}, pair;")
            byte = 2 * half + place
            lines.append(f"cvt.f32.f16 ${byte}, even;")
            lines.append(f"cvt.f32.f16 ${byte + 4}, odd;")
    return "{\n" + "\n".join(lines) + "\n}"


@cache
def pair_code(table: tuple[float, ...], dtype: torch.dtype) -> str:
    """PTX that turns four bytes into two pairs of 16-bit numbers of their lower halves, and then of the upper ones."""
    lines = list(_REGISTERS)
    for half in range(2):
        lines += _bytes_of_numbers(table, dtype, "$4", half)
        lines.append(f"prmt.b32 ${half}, low, high, 0x6240;")
        lines.append(f"prmt.b32 ${half + 2}, low, high, 0x7351;")
    return "{\n" + "\n".join(lines) + "\n}"


_REGISTERS = [".reg .b32 codes, below, mask, first, second, low, high, pair;"]


def _bytes_of_numbers(table: tuple[float, ...], dtype: torch.dtype, word: str, half: int) -> list[str]:
    """Four codes, the `half` of a word -> the lower bytes of their numbers in `low`, the upper ones in `high`."""
    bits = torch.tensor(table, dtype=dtype).view(torch.int16).tolist()
    lines = [
        f"shr.b32 codes, {word}, {16 * half};",
        "and.b32 below, codes, 0x7777;",
        # Byte 1 of the source is negative: its sign, or that of byte 0, fills a byte of the mask.
        "shr.b32 mask, codes, 3;",
        "and.b32 mask, mask, 0x1111;",
        "or.b32 mask, mask, 0x8888;",
        "prmt.b32 mask, 0x8000, 0, mask;",
    ]
    for name, shift in (("low", 0), ("high", 8)):
        words = [sum(((bits[first + i] >> shift) & 255) << (8 * i) for i in range(4)) for first in (0, 4, 8, 12)]
        lines += [
            f"mov.b32 first, {words[0]:#x};",
            f"prmt.b32 first, first, {words[1]:#x}, below;",
            f"mov.b32 second, {words[2]:#x};",
            f"prmt.b32 second, second, {words[3]:#x}, below;",
            f"lop3.b32 {name}, mask, second, first, 0xCA;",
        ]
    return lines


@jit
def table_numbers(words: Scalar, table: Pointer, CODE: constexpr) -> Scalar:
    """Of int32 words: the numbers of the lower halves of bytes 0 to 3, and those of the upper halves."""
    if CODE is None:
        numbers = (
            tl.load(table + (words & 15)),
            tl.load(table + ((words >> 8) & 15)),
            tl.load(table + ((words >> 16) & 15)),
            tl.load(table + ((words >> 24) & 15)),
            tl.load(table + ((words >> 4) & 15)),
            tl.load(table + ((words >> 12) & 15)),
            tl.load(table + ((words >> 20) & 15)),
            tl.load(table + ((words >> 28) & 15)),
        )
    else:
        numbers = tl.inline_asm_elementwise(
            CODE,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [words],
            dtype=(
                tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    return numbers


@jit
def table_pairs(codes: Scalar, table: Pointer, DTYPE: constexpr, CODE: constexpr) -> Scalar:
    """Of bytes: the 16-bit numbers of their lower halves, and those of the upper halves."""
    if CODE is None:
        wide = codes.to(tl.int32)
        pairs = tl.load(table + (wide & 15)).to(DTYPE), tl.load(table + (wide >> 4)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        pairs = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        pairs = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return pairs
