"""Matrices of 4 bits, and weight-only ones of 8 bits, written out, for products of so many rows that this costs little
beside them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, is_interpreted, jit, kernel_or_torch, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.assembly import code_pairs
from legato.kernels.quantized.eight_bit import LARGEST
from legato.kernels.quantized.operand import Operand
from legato.kernels.quantized.table import table_pairs

TILE_ROWS = 32


def unpacked(operand: Operand, dtype: torch.dtype) -> Tensor:
    """[out, in] in 16 bits."""
    return kernel_or_torch(operand.numbers, _unpacked_triton, _unpacked_torch)(operand, dtype, None)


def unpacked_rows(operand: Operand) -> Operand:
    """The same in fp8 with one scale for each row: rounded, as rows of x are."""
    largest = (operand.scale.abs().amax(1, keepdim=True).float() * _largest_number(operand)).clamp(min=1e-12)
    scale = largest / LARGEST[torch.float8_e4m3fn]
    run = kernel_or_torch(operand.numbers, _unpacked_triton, _unpacked_torch)
    numbers = run(operand, torch.float8_e4m3fn, scale)
    return replace(
        operand, form="fp8", numbers=numbers, scale=scale, group_size=operand.in_features, zero=None, table=None
    )


def _largest_number(operand: Operand) -> float:
    """A code less its zero is not larger, nor a number of the table."""
    if operand.table is not None:
        return max(abs(number) for number in operand.table)
    return 8.0 if operand.zero is None else 16.0


def _unpacked_torch(operand: Operand, dtype: torch.dtype, row_scale: Tensor | None) -> Tensor:
    values = operand.values(torch.float32)
    return (values if row_scale is None else values / row_scale).to(dtype)


def _unpacked_triton(operand: Operand, dtype: torch.dtype, row_scale: Tensor | None) -> Tensor:
    width, in_features = operand.out_features, operand.in_features
    out = torch.empty(width, in_features, dtype=dtype, device=operand.numbers.device)
    _unpack_kernel[(ceil_div(width, TILE_ROWS), ceil_div(in_features, 128))](
        out,
        operand.numbers,
        operand.scale,
        operand.zero,
        operand.table_tensor,
        row_scale,
        FORM=operand.form,
        WIDTH=width,
        IN_FEATURES=in_features,
        ROW_BYTES=operand.numbers.shape[1],
        GROUP_SIZE=operand.group_size,
        NUM_GROUPS=operand.num_groups,
        TILE_ROWS=TILE_ROWS,
        TABLE_CODE=operand.pair_code(torch.float16),
        ASSEMBLE=not is_interpreted(),
        num_warps=4,
        **launch_options(operand.numbers),
    )
    return out


@jit
def _unpack_kernel(
    out: Pointer,
    numbers: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    row_scale: Pointer,
    FORM: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    ROW_BYTES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TILE_ROWS: constexpr,
    TABLE_CODE: constexpr,
    ASSEMBLE: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program writes 128 columns of some rows."""
    # Beyond the last row it is written again.
    row = tl.minimum(tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS), WIDTH - 1).to(tl.int64)
    unit = tl.program_id(1)
    if FORM == "int4":
        codes = tl.load(numbers + row[:, None] * ROW_BYTES + unit * 64 + tl.arange(0, 64)[None, :])
        lower, upper = code_pairs(codes, tl.float16, ASSEMBLE)
    elif FORM == "table":
        codes = tl.load(numbers + row[:, None] * ROW_BYTES + unit * 64 + tl.arange(0, 64)[None, :])
        lower, upper = table_pairs(codes, table, tl.float16, TABLE_CODE)
    else:
        column = unit * 128 + tl.arange(0, 64)[None, :]
        bytes_of_row = numbers + row[:, None] * ROW_BYTES + column
        lower = tl.load(bytes_of_row, mask=column < IN_FEATURES, other=0)
        upper = tl.load(bytes_of_row + 64, mask=column + 64 < IN_FEATURES, other=0)
    # An earlier product may still read what is overwritten here.
    wait_for_previous(OVERLAP)
    _store_half(out, lower, scale, zero, row_scale, row, unit * 128, FORM, IN_FEATURES, GROUP_SIZE, NUM_GROUPS)
    _store_half(out, upper, scale, zero, row_scale, row, unit * 128 + 64, FORM, IN_FEATURES, GROUP_SIZE, NUM_GROUPS)


@jit
def _store_half(
    out: Pointer,
    numbers: Scalar,
    scale: Pointer,
    zero: Pointer,
    row_scale: Pointer,
    row: Scalar,
    first: Scalar,
    FORM: constexpr,
    IN_FEATURES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
) -> None:
    column = first + tl.arange(0, 64)
    group = tl.minimum(column // GROUP_SIZE, NUM_GROUPS - 1)
    place = row[:, None] * NUM_GROUPS + group[None, :]
    value = numbers.to(tl.float32)
    # What `code_pairs` adds to codes of 4 bits.
    offset: tl.constexpr = 1024.0 if FORM == "int4" else 0.0
    factor = tl.load(scale + place).to(tl.float32)
    if FORM == "table" or FORM == "int8":
        value *= factor
    elif zero is None:
        value = (value - (offset + (8.0 if FORM == "int4" else 128.0))) * factor
    elif zero.dtype.element_ty.is_floating():
        value = (value - offset) * factor + tl.load(zero + place).to(tl.float32)
    else:
        value = (value - (tl.load(zero + place).to(tl.float32) + offset)) * factor
    if row_scale is not None:
        value /= tl.load(row_scale + row)[:, None]
    there = (column < IN_FEATURES)[None, :]
    tl.store(out + row[:, None] * IN_FEATURES + column[None, :], value.to(out.dtype.element_ty), mask=there)
