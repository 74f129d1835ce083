"""Quantized matrices as operands of kernels, where there are kernels for them."""

from __future__ import annotations

import torch

from legato.kernels.device import limits_of
from legato.kernels.language import runs_triton
from legato.kernels.quantized.linear import FEW_ROWS, MANY_ROWS, kernel_for
from legato.kernels.quantized.operand import Form, Operand, supports
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.packing import code_width
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix, TableCodes

NUMBERS: dict[torch.dtype, Form] = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
CODES: dict[int, Form] = {4: "int4", 8: "codes"}


def operand_of(matrix: QuantizedMatrix) -> Operand | None:
    """None where kernels do not know the form, or groups are not of equal size. Columns are in the order stored."""
    groups = matrix.groups
    if groups.index is not None:
        return None
    size = (matrix.in_features, groups.size)
    if isinstance(matrix, GroupedIntegers) and code_width(matrix.bits) in CODES:
        width = code_width(matrix.bits)
        if matrix.bits != width:  # without zeros the middle is that of fewer bits
            matrix = matrix.with_zero()
        zero = matrix.zero if matrix.minimum is None else matrix.minimum
        operand = Operand(CODES[width], matrix.codes, matrix.scale, *size, zero=zero)
    elif isinstance(matrix, ScaledMatrix) and matrix.numbers.dtype in NUMBERS:
        operand = Operand(NUMBERS[matrix.numbers.dtype], matrix.numbers, matrix.scale, *size)
    elif isinstance(matrix, TableCodes):
        operand = Operand("table", matrix.codes, matrix.scale, *size, table=matrix.table)
    else:
        return None
    return operand if supports(operand) else None


def operand_on_gpu(matrix: QuantizedMatrix) -> Operand | None:
    """None also where Triton does not run."""
    operand = operand_of(matrix)
    return operand if operand is not None and runs_triton(operand.numbers) else None


def describe(operand: Operand) -> str:
    """Which kernels multiply few, some and many rows, for the log."""
    limits = limits_of(operand.numbers)
    counts = (1, 2, FEW_ROWS + 1, MANY_ROWS)
    found = [(count, kernel_for(count, operand, limits)) for count in counts]
    ranges: list[str] = []
    for (first, kernel), (last, _) in zip(found, [*found[1:], (0, None)], strict=True):
        if not ranges or not ranges[-1].endswith(kernel):
            shown = f"{first}" if last - first == 1 else f"{first}+" if last == 0 else f"{first} to {last - 1}"
            ranges.append(f"{shown} rows {kernel}")
    return ", ".join(ranges)
