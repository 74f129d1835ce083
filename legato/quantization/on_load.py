"""Dense matrices quantized while they are loaded: round to nearest, without calibration.

int8, bitsandbytes                    int8, a scale for each row
eetq                                  the same numbers, in products that never round activations
fp8                                   e4m3, a scale for each row, with the least squared error
int4                                  4-bit integers with a zero, groups of 128
bitsandbytes-nf4, bitsandbytes-fp4    bitsandbytes' tables, groups of 32; attention and last layer int8

Products of few weights are int8 instead of fp8 or tables (`SMALL_QUANTIZERS`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.quantization.matrix import NUMBERS_AT_ONCE, ColumnGroups
from legato.quantization.method import Quantizer
from legato.quantization.packing import pack_codes
from legato.quantization.schemes import FP4, NF4, GroupedIntegers, ScaledMatrix, TableCodes

INT8_MAX = 127
# Shrunken ranges that are tried for each group: cutting off the largest number may serve all others.
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
TABLE_SHRINK = (1.0, 0.9, 0.8)
# Where numbers fall between two powers of two decides about their error in floating point; twice a scale is the same.
STRETCH = tuple(2 ** (step / 8) for step in range(8))
# Of [-1, 1]: all numbers of a cell get the code that is nearest to its centre. On a CPU this takes a sixth of the time
# of a binary search for each number.
CELLS = 4096
LEAST_SCALE = 1e-30


@dataclass(frozen=True)
class RowQuantizer:
    """int8 or float8 with one scale for each row."""

    dtype: torch.dtype
    group_size: int = 0

    def __call__(self, matrix: torch.Tensor) -> ScaledMatrix:
        largest = INT8_MAX if self.dtype == torch.int8 else torch.finfo(self.dtype).max
        scale = matrix.abs().amax(1, keepdim=True).float() / largest
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        numbers = torch.empty(matrix.shape, dtype=self.dtype, device=matrix.device)
        for some, scales, into in _in_pieces(matrix, scale, numbers):
            wide = some.float()
            if self.dtype.is_floating_point:
                scales.copy_(self._best_scale(wide, scales))
            scaled = (wide / scales).clamp_(-largest, largest)
            into.copy_(scaled.round_() if self.dtype == torch.int8 else scaled)
        return ScaledMatrix(ColumnGroups.regular(matrix.shape[1], 0), scale, numbers)

    def _best_scale(self, numbers: torch.Tensor, least_scale: torch.Tensor) -> torch.Tensor:
        """[rows, 1], with the least squared error of each row."""
        best, least = least_scale, torch.full_like(least_scale, torch.inf)
        for stretch in STRETCH[:1] if numbers.is_meta else STRETCH:
            scale = least_scale * stretch
            error = (numbers / scale).to(self.dtype).float().mul_(scale).sub_(numbers).square_().sum(1, keepdim=True)
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        return best


@dataclass(frozen=True)
class WeightOnlyQuantizer:
    """int8 with one scale for each row, as codes of 8 bits: kernels multiply these with activations as they are,
    however many rows there are."""

    group_size: int = 0

    def __call__(self, matrix: torch.Tensor) -> GroupedIntegers:
        rows = RowQuantizer(torch.int8)(matrix)
        codes = rows.numbers.view(torch.uint8) ^ 0x80  # plus 128
        return GroupedIntegers.of(codes, 8, rows.scale, None, rows.groups)


@dataclass(frozen=True)
class TableQuantizer:
    """The nearest number of a table. Scales are tried, the best one is fitted to the numbers that it rounds to, and the
    one with the least squared error stays."""

    table: tuple[float, ...]
    group_size: int = 32

    def __call__(self, matrix: torch.Tensor) -> TableCodes:
        grouped, groups = _grouped(matrix, self.group_size)
        scale = torch.empty(grouped.shape[:2], dtype=matrix.dtype, device=matrix.device)
        codes = torch.empty(grouped.shape, dtype=torch.uint8, device=matrix.device)
        table, centres = torch.tensor(self.table), (torch.arange(CELLS) + 0.5) * (2 / CELLS) - 1
        nearest = (centres[:, None] - table).abs().argmin(1)
        code_of, number_of = (each.to(matrix.device) for each in (nearest.to(torch.uint8), table[nearest]))
        for some, scales, into in _in_pieces(grouped, scale, codes):
            scales.copy_(self._best_scale(some.float(), matrix.dtype, number_of))
            into.copy_(code_of[_cells(some.float(), scales.float())])
        return TableCodes(groups, scale, pack_codes(_ungrouped(codes, matrix), 4), self.table)

    @property
    def _shares(self) -> tuple[float, ...]:
        """A negative scale turns the table round: it helps where numbers of the table have one sign only."""
        is_symmetric = {-number for number in self.table} == set(self.table)
        return TABLE_SHRINK if is_symmetric else (*TABLE_SHRINK, *(-share for share in TABLE_SHRINK))

    def _best_scale(self, numbers: torch.Tensor, dtype: torch.dtype, number_of: torch.Tensor) -> torch.Tensor:
        """[rows, groups] of [rows, groups, columns]"""
        largest = numbers.abs().amax(2)
        if numbers.is_meta:  # only counted
            return largest
        best, least = largest, torch.full_like(largest, torch.inf)

        def compare(scale: torch.Tensor) -> None:
            nonlocal best, least
            scale = scale.to(dtype).float()
            error = (number_of[_cells(numbers, scale)] * scale[..., None]).sub_(numbers).square_().sum(2)
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)

        for share in self._shares:
            compare(largest * share)
        rounded = number_of[_cells(numbers, best)]
        compare((rounded * numbers).sum(2) / rounded.square().sum(2).clamp_(min=LEAST_SCALE))
        return best


@dataclass(frozen=True)
class IntegerQuantizer:
    """Integers with a zero for each group; the range of a group is the one of `SHRINK` with the least squared error."""

    bits: int = 4
    group_size: int = 128

    def __call__(self, matrix: torch.Tensor) -> GroupedIntegers:
        grouped, groups = _grouped(matrix, self.group_size)
        scale = torch.empty(grouped.shape[:2], dtype=matrix.dtype, device=matrix.device)
        zero = torch.empty(grouped.shape[:2], dtype=torch.uint8, device=matrix.device)
        codes = torch.empty(grouped.shape, dtype=torch.uint8, device=matrix.device)
        for some, scales, zeros, into in _in_pieces(grouped, scale, zero, codes):
            for out, found in zip((scales, zeros, into), self._best(some.float(), matrix.dtype), strict=True):
                out.copy_(found)
        return GroupedIntegers.of(_ungrouped(codes, matrix), self.bits, scale, zero, groups)

    def _best(self, numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scale, zero and codes of [rows, groups, columns]. Codes are those of the rounded scale."""
        low, high = numbers.amin(2).clamp(max=0), numbers.amax(2).clamp(min=0)
        best: tuple[torch.Tensor, ...] | None = None
        for share in SHRINK[:1] if numbers.is_meta else SHRINK:
            found = self._within(numbers, low * share, high * share, dtype)
            if best is None:
                best = found
                continue
            better = found[0] < best[0]
            best = tuple(
                torch.where(better.view(better.shape + (1,) * (new.dim() - 2)), new, old)
                for new, old in zip(found, best, strict=True)
            )
        assert best is not None
        return best[1], best[2], best[3]

    def _within(
        self, numbers: torch.Tensor, low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        largest = (1 << self.bits) - 1
        scale = ((high - low) / largest).to(dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        wide = scale.float()
        zero = (-low / wide).round_().clamp_(0, largest)
        codes = (numbers / wide[..., None]).round_().add_(zero[..., None]).clamp_(0, largest)
        error = ((codes - zero[..., None]) * wide[..., None] - numbers).square_().sum(2)
        return error, scale, zero.to(torch.uint8), codes.to(torch.uint8)


QUANTIZERS: dict[str, Quantizer] = {
    "bitsandbytes": RowQuantizer(torch.int8),
    "bitsandbytes-nf4": TableQuantizer(NF4),
    "bitsandbytes-fp4": TableQuantizer(FP4),
    "eetq": WeightOnlyQuantizer(),
    "fp8": RowQuantizer(torch.float8_e4m3fn),
    "int8": RowQuantizer(torch.int8),
    "int4": IntegerQuantizer(),
}
# Of attention (queries, keys, values and outputs) and of the last layer, where it is not the same. Attention is an
# eighth to a fifth of most models, and causes half of the loss in 4 bits. The last layer of Qwen2.5-Coder-0.5B causes a
# sixth of what is left, four times as much as each of the first four and of the two before it.
PRECISE_QUANTIZERS: dict[str, Quantizer] = dict.fromkeys(
    ("bitsandbytes-nf4", "bitsandbytes-fp4"), RowQuantizer(torch.int8)
)
# Of products of few weights, where it is not the same. Rows of int8 take as much memory as rows of fp8, and their error
# is a third: with all of its matrices in fp8, SmolLM2-135M loses four times as much (KL) as in int8.
SMALL_QUANTIZERS: dict[str, Quantizer] = dict.fromkeys(
    ("fp8", "bitsandbytes-nf4", "bitsandbytes-fp4"), RowQuantizer(torch.int8)
)


def _cells(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of [rows, groups, columns] with scales [rows, groups]; beyond the ends of the table the outermost ones."""
    factor = torch.where(scale.abs() > LEAST_SCALE, CELLS / 2 / scale, torch.zeros_like(scale))
    # What is not a number has some cell, too: its scale is none either.
    return (numbers * factor[..., None]).add_(CELLS / 2).nan_to_num_().clamp_(0, CELLS - 1).int()


def _in_pieces(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Some rows of all of them at a time, so that what is computed in float32 stays small."""
    if tensors[0].is_meta:  # only counted
        return [tensors]
    step = max(1, NUMBERS_AT_ONCE * tensors[0].shape[0] // max(1, tensors[0].numel()))
    return list(zip(*(tensor.split(step) for tensor in tensors), strict=True))


def _grouped(matrix: torch.Tensor, size: int) -> tuple[torch.Tensor, ColumnGroups]:
    """[out, in] -> [out, groups, size]. The last group is filled up with the row's last number, which does not widen
    its range."""
    groups = ColumnGroups.regular(matrix.shape[1], size)
    if missing := -matrix.shape[1] % groups.size:
        matrix = F.pad(matrix[None], (0, missing), mode="replicate")[0]
    return matrix.unflatten(1, (-1, groups.size)), groups


def _ungrouped(codes: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return codes.flatten(1)[:, : matrix.shape[1]]
