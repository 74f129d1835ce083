"""The quantization schemes: integers in groups, 8-bit numbers with scales, codes of a table.

GroupedIntegers   2, 4 or 8 bits    (code - zero) · scale       GPTQ, AWQ, compressed-tensors, int4
                                    code · scale + minimum      GGUF
ScaledMatrix      int8, float8      number · scale              int8 and fp8 by row, by tensor, by block; GGUF
TableCodes        4 bits            table[code] · scale         nf4, fp4, MXFP4, NVFP4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix, grouped_columns
from legato.quantization.packing import code_width, pack_codes, unpack_codes

# Code -> number. The values are those of bitsandbytes, bit for bit.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
FP4 = (*_FP4, *(-number for number in _FP4))
# Two exponent bits and one of the mantissa: the numbers of MXFP4 and NVFP4.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-number for number in _E2M1))


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class GroupedIntegers(QuantizedMatrix):
    """Unsigned codes of 2 to 8 bits, those of 3 bits in 4 and of 5 to 7 in 8."""

    scale: torch.Tensor  # [out, groups], floating point
    codes: torch.Tensor  # [out, bytes] uint8, as `pack_codes` has them
    bits: int
    zero: torch.Tensor | None = None  # [out, groups] uint8; None: half of the codes' range
    minimum: torch.Tensor | None = None  # [out, groups], floating point: there is no zero, this is added

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        bits: int,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        groups: ColumnGroups,
        minimum: torch.Tensor | None = None,
    ) -> GroupedIntegers:
        """From codes [out, in] and zeros [out, groups], both uint8, or minima [out, groups]."""
        assert zero is None or minimum is None
        middle = 1 << (bits - 1)
        if zero is not None and not zero.is_meta and bool((zero == middle).all()):
            zero = None
        return cls(groups, scale.contiguous(), pack_codes(codes, code_width(bits)), bits, zero, minimum)

    @property
    def kind(self) -> str:
        minima = "" if self.minimum is None else " with minima"
        plain = f"{self.bits}-bit integers{minima}, groups of {self.groups.size}"
        return plain if self._is_plain else self._kind_in_order

    @property
    def _is_plain(self) -> bool:
        return self.groups.index is None and self.groups.order is None

    @property
    def _kind_in_order(self) -> str:
        return f"{self.bits}-bit integers, act-order"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        compute = computing_dtype(dtype)
        numbers = unpack_codes(self.codes, code_width(self.bits), self.in_features).to(compute)
        if self.minimum is not None:
            scaled = numbers * self.groups.spread(self.scale.to(compute))
            return (scaled + self.groups.spread(self.minimum.to(compute))).to(dtype)
        if self.zero is None:
            numbers -= 1 << (self.bits - 1)
        else:
            numbers -= self.groups.spread(self.zero.to(compute))
        return (numbers * self.groups.spread(self.scale.to(compute))).to(dtype)

    def can_stack(self, other: QuantizedMatrix) -> bool:
        if isinstance(other, GroupedIntegers) and (self.zero is None) != (other.zero is None):
            return self.with_zero().can_stack(other.with_zero())
        return super().can_stack(other)

    def stacked(self, others: list[Self]) -> Self:  # type: ignore[override]
        if any((other.zero is None) != (self.zero is None) for other in others):
            return self.with_zero().stacked([other.with_zero() for other in others])
        return super().stacked(others)

    def with_zero(self) -> Self:
        """The same with a tensor of zeros, unless it has minima."""
        if self.zero is not None or self.minimum is not None:
            return self
        zero = torch.full(self.scale.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=self.device)
        return replace(self, zero=zero)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        width = code_width(self.bits)
        codes = unpack_codes(self.codes, width, self.in_features).index_select(1, places)
        zero = None if self.zero is None else self.zero[:, left].contiguous()
        minimum = None if self.minimum is None else self.minimum[:, left].contiguous()
        scale, packed = self.scale[:, left].contiguous(), pack_codes(codes, width)
        return replace(self, groups=groups, scale=scale, codes=packed, zero=zero, minimum=minimum)


@dataclass(frozen=True)
class ScaledMatrix(QuantizedMatrix):
    """int8 or float8 numbers; one scale for a row, or for 128 columns of it where the checkpoint has blocks."""

    scale: torch.Tensor  # [out, groups], floating point
    numbers: torch.Tensor  # [out, in]

    @property
    def kind(self) -> str:
        name = "int8" if self.numbers.dtype == torch.int8 else "fp8"
        whole = self.groups.index is None and self.groups.size == self.in_features
        return f"{name}, {'scale by row' if whole else 'scale by block'}"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        compute = computing_dtype(dtype)
        scale = self.scale.to(compute)
        return (self.numbers.to(compute) * (scale if scale.shape[1] == 1 else self.groups.spread(scale))).to(dtype)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        numbers = self.numbers.index_select(1, places)
        return replace(self, groups=groups, scale=self.scale[:, left].contiguous(), numbers=numbers)


@dataclass(frozen=True)
class TableCodes(QuantizedMatrix):
    """4-bit codes that stand for the numbers of a table."""

    scale: torch.Tensor  # [out, groups], floating point
    codes: torch.Tensor  # [out, bytes] uint8
    table: tuple[float, ...]

    @property
    def kind(self) -> str:
        names = {NF4: "nf4", FP4: "fp4", E2M1: "e2m1"}
        return f"{names.get(self.table, '4-bit table')}, groups of {self.groups.size}"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        compute = computing_dtype(dtype)
        table = torch.tensor(self.table, dtype=compute, device=self.device)
        numbers = table[unpack_codes(self.codes, 4, self.in_features).int()]
        return (numbers * self.groups.spread(self.scale.to(compute))).to(dtype)

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        codes = unpack_codes(self.codes, 4, self.in_features).index_select(1, places)
        return replace(self, groups=groups, scale=self.scale[:, left].contiguous(), codes=pack_codes(codes, 4))


@dataclass(frozen=True)
class ColumnParts(QuantizedMatrix):
    """Integers of several widths side by side, as exl2 has them. `groups` has the order of the columns only."""

    parts: tuple[GroupedIntegers, ...]

    @property
    def kind(self) -> str:
        return f"integers of {', '.join(str(part.bits) for part in self.parts)} bits"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.values(dtype) for part in self.parts], dim=1)

    def can_stack(self, other: QuantizedMatrix) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        order = self.groups.order
        return sum(part.nbytes for part in self.parts) + (0 if order is None else order.nbytes)

    def _any_tensor(self) -> torch.Tensor:
        return self.parts[0].codes

    def _on_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(self, parts=tuple(part._on_rows(change) for part in self.parts))

    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        kept, begin = [], 0
        for part in self.parts:
            end = begin + part.in_features
            mine = places[(places >= begin) & (places < end)] - begin
            if len(mine):
                inputs = torch.arange(len(mine), device=mine.device)
                columns, order, found = grouped_columns(
                    part.groups.of_columns(self.device)[mine], inputs, part.groups.size
                )
                kept.append(part._with_columns(mine[order], columns, found))
            begin = end
        return replace(self, groups=groups, parts=tuple(kept))
