"""The assembly that looks codes up or spreads them, run by a small emulator: no device is needed."""

from __future__ import annotations

import re
import struct

import pytest
import torch

from legato.kernels.quantized import assembly
from legato.kernels.quantized.table import lookup_code, pair_code
from legato.quantization.schemes import E2M1, FP4, NF4

WORDS = [0x00000000, 0x76543210, 0xFEDCBA98, 0xF0E1D2C3, 0x8899AABB, 0x01234567, 0xFFFFFFFF, 0x7F80C3A5]
OPERATIONS = {
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "mov": lambda a: a,
    "prmt": lambda a, b, selector: permuted(a, b, selector),
}


def permuted(a: int, b: int, selector: int) -> int:
    sources, result = struct.pack("<II", a, b), 0
    for place in range(4):
        nibble = (selector >> (4 * place)) & 15
        byte = sources[nibble & 7]
        result |= (byte if nibble < 8 else 0xFF * (byte >> 7)) << (8 * place)
    return result


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def run(code: str, num_outputs: int, word: int) -> list:
    """What the outputs hold after the instructions: float32 numbers as such, others as bits."""
    registers: dict = {f"${num_outputs}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.sub(r"[{}]\n|\n[{}]", "\n", code).strip().splitlines():
        if not line.strip() or line.startswith(".reg"):
            continue
        operation, rest = line.strip().rstrip(";").split(" ", 1)
        names = [name.strip(" {}") for name in rest.split(",")]
        if operation == "cvt.f32.f16":
            registers[names[0]] = half(value(names[1]))
        elif operation == "cvt.rn.f16x2.e4m3x2":
            pair = torch.tensor([value(names[1])], dtype=torch.int32).to(torch.int16).view(torch.float8_e4m3fn)
            registers[names[0]] = int(pair.half().view(torch.int32)) & 0xFFFFFFFF
        elif operation == "mov.b32" and len(names) == 3:
            registers[names[0]], registers[names[1]] = value(names[2]) & 0xFFFF, value(names[2]) >> 16
        elif operation == "lop3.b32":
            a, b, c, table = map(value, names[1:])
            assert table in (0xCA, 0xEA), hex(table)
            registers[names[0]] = (a & b) | (~a & c if table == 0xCA else c)
        else:
            registers[names[0]] = OPERATIONS[operation.removesuffix(".b32")](*map(value, names[1:])) & 0xFFFFFFFF
    return [registers[f"${output}"] for output in range(num_outputs)]


def nibbles(word: int) -> tuple[list[int], list[int]]:
    """Lower and upper halves of the four bytes."""
    data = struct.pack("<I", word)
    return [byte & 15 for byte in data], [byte >> 4 for byte in data]


def bits_of(numbers: list[float], dtype: torch.dtype) -> list[int]:
    """Pairs of 16-bit numbers in words, the first in the lower half."""
    halves = [bits & 0xFFFF for bits in torch.tensor(numbers, dtype=dtype).view(torch.int16).tolist()]
    return [low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True)]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("table", [NF4, FP4, E2M1])
def test_words_become_the_numbers_of_the_table(word, table):
    expected = [table[code] for codes in nibbles(word) for code in codes]
    assert run(lookup_code(table), 8, word) == torch.tensor(expected).half().tolist()
    for dtype in (torch.bfloat16, torch.float16):
        assert run(pair_code(table, dtype), 4, word) == bits_of(expected, dtype)


@pytest.mark.parametrize("word", WORDS)
def test_codes_become_floats_with_an_offset(word):
    codes = [code for half_of_bytes in nibbles(word) for code in half_of_bytes]
    for code, offset, dtype in (
        (assembly.BF16_CODES, 128, torch.bfloat16),
        (assembly.F16_CODES, 1024, torch.float16),
    ):
        text = getattr(code, "value", code)
        assert run(text, 4, word) == bits_of([offset + number for number in codes], dtype)


@pytest.mark.parametrize("word", [word for word in WORDS if 0x7F not in struct.pack("<I", word & 0x7F7F7F7F)])
def test_bits_of_fp8_are_those_of_a_small_number(word):
    numbers = torch.frombuffer(bytearray(struct.pack("<I", word)), dtype=torch.float8_e4m3fn).double()
    for code, factor, dtype in (
        (assembly.FP8_TO_BF16, 2.0**-120, torch.bfloat16),
        (assembly.FP8_TO_F16, 2.0**-8, torch.float16),
    ):
        assert run(getattr(code, "value", code), 2, word) == bits_of((numbers * factor).tolist(), dtype)


@pytest.mark.parametrize("word", [word for word in WORDS if 0x7F not in struct.pack("<I", word & 0x7F7F7F7F)])
def test_four_numbers_of_fp8_are_converted(word):
    numbers = torch.frombuffer(bytearray(struct.pack("<I", word)), dtype=torch.float8_e4m3fn)
    assert run(getattr(assembly.FP8_WORD, "value", assembly.FP8_WORD), 4, word) == numbers.float().tolist()
