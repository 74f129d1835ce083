"""A quantized matrix as kernels see it, and how they read numbers and scales.

Kernels know five forms of numbers. Whatever the form, groups of columns share a scale; a row may be one group.

int4     codes of 4 bits, two in a byte: (code - zero) · scale, or code · scale + minimum
table    codes of 4 bits, two in a byte: table[code] · scale
codes    uint8: (code - zero) · scale, or code · scale + minimum
int8     number · scale
fp8      number · scale
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from legato.kernels.language import Scalar, ceil_div, constexpr, is_interpreted, jit, tl
from legato.kernels.quantized.table import lookup_code, pair_code

Form = Literal["int4", "table", "codes", "int8", "fp8"]

# Columns whose codes of 4 bits share 64 bytes: byte j has those of columns j and j + 64.
UNIT = 128
# Sizes of groups that divide 64 columns; others are a multiple of 128, or a whole row.
SMALL_GROUPS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Operand:
    """[out_features, in_features], on a GPU."""

    form: Form
    numbers: Tensor  # [out, in] of 8 bits; packed: [out, 64 for each 128 columns] uint8, zeros beyond the last column
    scale: Tensor  # [out, groups], floating point
    in_features: int
    group_size: int
    # [out, groups], of codes. uint8: zeros; None: half of the range of codes; floating point: minima in their place.
    zero: Tensor | None = None
    table: tuple[float, ...] | None = None  # of 16 numbers

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def is_packed(self) -> bool:
        return self.form in ("int4", "table")

    @property
    def num_groups(self) -> int:
        return ceil_div(self.in_features, self.group_size)

    @property
    def has_one_scale(self) -> bool:
        """For a row."""
        return self.num_groups == 1

    @property
    def has_small_groups(self) -> bool:
        """A step of a kernel meets several scales: each number is multiplied with its own, and rounded to 16 bits."""
        return not self.has_one_scale and self.group_size % UNIT != 0

    @property
    def has_minimum(self) -> bool:
        return self.zero is not None and self.zero.is_floating_point()

    @property
    def middle(self) -> int:
        """The code of zero, where there are no zeros of groups."""
        return 8 if self.form == "int4" else 128

    @property
    def lookup_code(self) -> str | None:
        return None if self.table is None or is_interpreted() else lookup_code(self.table)

    def pair_code(self, dtype: torch.dtype) -> str | None:
        return None if self.table is None or is_interpreted() else pair_code(self.table, dtype)

    def numbers_for(self, dtype: torch.dtype) -> Tensor:
        """To be multiplied with rows of this type: fp8 as bytes unless these are fp8, too."""
        return self.numbers.view(torch.uint8) if self.form == "fp8" and dtype.itemsize > 1 else self.numbers

    @property
    def table_tensor(self) -> Tensor | None:
        """For the interpreter, which has no code for tables."""
        if self.table is None or not is_interpreted():
            return None
        return torch.tensor(self.table, device=self.numbers.device)

    def rows(self, first: int, last: int) -> Operand:
        """Some outputs."""
        zero = None if self.zero is None else self.zero[first:last]
        return replace(self, numbers=self.numbers[first:last], scale=self.scale[first:last], zero=zero)

    def values(self, dtype: torch.dtype) -> Tensor:
        """[out, in] by torch: what kernels are tested against."""
        numbers = self.numbers
        if self.is_packed:
            units = numbers.unflatten(1, (-1, UNIT // 2))
            numbers = torch.stack((units & 15, units >> 4), dim=2).flatten(1)[:, : self.in_features]
        if self.table is not None:
            wide = torch.tensor(self.table, dtype=dtype, device=numbers.device)[numbers.int()]
        else:
            wide = numbers.to(dtype)
        group = torch.arange(self.in_features, device=numbers.device) // self.group_size
        if self.zero is not None and self.has_minimum:
            return wide * self.scale.to(dtype)[:, group] + self.zero.to(dtype)[:, group]
        if self.form in ("int4", "codes"):
            wide = wide - (self.middle if self.zero is None else self.zero.to(dtype)[:, group])
        return wide * self.scale.to(dtype)[:, group]


def supports(operand: Operand) -> bool:
    """Whether rows begin at whole words, and 64 columns have known scales."""
    is_regular = operand.has_one_scale or operand.group_size in SMALL_GROUPS or operand.group_size % UNIT == 0
    if operand.has_minimum:  # added where numbers are scaled one by one
        is_regular = not operand.has_one_scale and operand.group_size in SMALL_GROUPS[:2]
    return is_regular and operand.numbers.shape[1] % 16 == 0 and operand.in_features % 8 == 0


@jit
def number_of_word(word: Scalar, K: constexpr, FORM: constexpr, UPPER: constexpr) -> Scalar:
    """The number in byte K of int32 words as float32; packed: in its lower or upper half.

    Conversions are slow. The integers up to 2 ** 24 are float32 numbers, too: tiny ones, multiples of 2 ** -149. So the
    bits of a code, wherever they are, are a number that only needs the right power of two, and `factor_of_column` gives
    that to x, which meets many rows. The bits of fp8 become a number of float32 in the same way.
    """
    bit: tl.constexpr = 8 * K + 4 * UPPER
    if FORM == "fp8":
        # The sign, and behind four copies of it the bits of the number.
        value = ((word << (24 - bit)) >> 4) & -0x78100000
    else:
        mask: tl.constexpr = 15 if FORM == "int4" else 255
        if FORM == "int8":
            word = word ^ -0x7F7F7F80  # each byte is the number plus 128
        is_low: tl.constexpr = bit <= (20 if FORM == "int4" else 16)
        value = word & (mask << bit) if is_low else (word >> 8) & (mask << (bit - 8))
    return value.to(tl.float32, bitcast=True)


@jit
def factor_of_column(K: constexpr, FORM: constexpr, UPPER: constexpr) -> Scalar:
    """What x is multiplied with that meets `number_of_word`: all products are then 2 ** -49 of what they should be,
    with fp8 2 ** -60."""
    bit: tl.constexpr = 8 * K + 4 * UPPER
    shift: tl.constexpr = 0 if bit <= (20 if FORM == "int4" else 16) else 8
    factor: tl.constexpr = 2.0**60 if FORM == "fp8" else 2.0 ** (100 + shift - bit)
    return factor


@jit
def undo_number(sums: Scalar, totals: Scalar, zero: Scalar, FORM: constexpr) -> Scalar:
    """Sums of products of such x and numbers -> sums of products with the numbers less their zero. `totals` are the
    sums of x alone."""
    if FORM == "fp8":
        sums = sums * (2.0**60)
    elif FORM != "table":
        middle: tl.constexpr = 8 if FORM == "int4" else 128
        sums = sums * (2.0**49) - totals * (middle if zero is None else zero)
    return sums
