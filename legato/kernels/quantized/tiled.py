"""Rows times a quantized matrix on the matrix units, which multiply in the type of x: 16 bits, fp8 or int8.

Numbers of the matrix stay as they are until they are in registers, where they become exact numbers of that type, 4-bit
integers in fp8 included. Scales multiply the sums of a group. A program takes some rows of the matrix, which is the
left operand, and some rows of x; a step of it multiplies 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, is_interpreted, jit, jit_for_any, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.assembly import code_pairs, converted, minus
from legato.kernels.quantized.operand import Operand
from legato.kernels.quantized.table import table_pairs


@dataclass(frozen=True, slots=True)
class TiledConfig:
    tile_rows: int  # rows of the matrix per program
    rows: int  # rows of x per program
    num_warps: int
    num_stages: int
    split_k: int = 1


def tiled_linear(
    x: Tensor,  # [m, in_features], 16 bits, float8_e4m3fn or int8
    operand: Operand,
    config: TiledConfig,
    x_scale: Tensor | None = None,  # [m] float32, where x is quantized
    dtype: torch.dtype | None = None,  # of the result; that of x if it has 16 bits
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    (num_rows, in_features), width = x.shape, operand.out_features
    assert in_features == operand.in_features and x.stride(1) == 1, (x.shape, x.stride())
    num_tiles, split_k = ceil_div(width, config.tile_rows), config.split_k
    num_parts = ceil_div(num_rows, config.rows)
    assert split_k == 1 or num_tiles * num_parts <= NUM_COUNTERS, (num_tiles, num_parts)
    out_width = width if activation is None else width // 2
    out = torch.empty(num_rows, out_width, dtype=dtype or x.dtype, device=x.device)
    part_size = config.tile_rows * config.rows if split_k > 1 else 0
    # Programs of the same rows of the matrix stand side by side, so that it is read once.
    _tiled_kernel[(num_parts, num_tiles, split_k)](
        out,
        x,
        operand.numbers_for(x.dtype),
        operand.scale,
        operand.zero,
        operand.table_tensor,
        x_scale,
        bias,
        torch.empty(num_tiles * num_parts, split_k, part_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device),
        x.stride(0),
        num_rows,
        FORM=operand.form,
        ROWS=config.rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        ROW_BYTES=operand.numbers.shape[1],
        GROUP_SIZE=operand.group_size,
        NUM_GROUPS=operand.num_groups,
        TILE_ROWS=config.tile_rows,
        SPLIT_K=split_k,
        STAGES=config.num_stages,
        TABLE_CODE=operand.pair_code(x.dtype),
        ASSEMBLE=not is_interpreted(),
        ACTIVATION=activation,
        num_warps=config.num_warps,
        **launch_options(x),
    )
    return out


@jit_for_any("num_rows")
def _tiled_kernel(
    out: Pointer,
    x: Pointer,
    numbers: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    x_scale: Pointer,
    bias: Pointer,
    parts: Pointer,
    counters: Pointer,
    x_stride: Scalar,
    num_rows: Scalar,
    FORM: constexpr,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    ROW_BYTES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TILE_ROWS: constexpr,
    SPLIT_K: constexpr,
    STAGES: constexpr,
    TABLE_CODE: constexpr,
    ASSEMBLE: constexpr,
    ACTIVATION: constexpr,
    OVERLAP: constexpr,
) -> None:
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_steps: tl.constexpr = (IN_FEATURES + 127) // 128
    steps: tl.constexpr = (num_steps + SPLIT_K - 1) // SPLIT_K
    begin = split * steps
    end = tl.minimum(begin + steps, num_steps)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Beyond the last feature and the last row of x the last ones are read again, which spares the loads a mask.
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    x_rows = x + (tl.minimum(m, num_rows - 1).to(tl.int64) * x_stride)[None, :]
    wait_for_previous(OVERLAP)
    product = tile_sums(
        numbers, x_rows, scale, zero, table, row, begin, end, FORM, ROWS, IN_FEATURES, ROW_BYTES, GROUP_SIZE,
        NUM_GROUPS, TILE_ROWS, STAGES, TABLE_CODE, ASSEMBLE,
    )  # fmt: skip
    if x_scale is not None:
        product *= tl.load(x_scale + tl.minimum(m, num_rows - 1))[None, :]
    if bias is not None:
        product += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if SPLIT_K == 1:
        _store_transposed(out, tile, product, m, num_rows, WIDTH, ACTIVATION)
    else:
        group = tile * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = TILE_ROWS * ROWS
        place = tl.arange(0, TILE_ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(parts + (group * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + group, SPLIT_K):
            product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (group * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _store_transposed(out, tile, product, m, num_rows, WIDTH, ACTIVATION)


@jit
def tile_sums(
    numbers: Pointer,
    x_rows: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    row: Scalar,
    begin: Scalar,
    end: Scalar,
    FORM: constexpr,
    ROWS: constexpr,
    IN_FEATURES: constexpr,
    ROW_BYTES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TILE_ROWS: constexpr,
    STAGES: constexpr,
    TABLE_CODE: constexpr,
    ASSEMBLE: constexpr,
) -> Scalar:
    """[TILE_ROWS, ROWS]: products of steps `begin` to `end` of the rows `row` of the matrix with rows of x, at `x_rows`
    [1, ROWS]."""
    rows = numbers + row.to(tl.int64)[:, None] * ROW_BYTES
    if NUM_GROUPS == 1 and x_rows.dtype.element_ty == tl.int8:
        sums = tl.zeros((TILE_ROWS, ROWS), dtype=tl.int32)
    else:
        sums = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES, loop_unroll_factor=1):
        if FORM == "int4" or FORM == "table":
            sums = _add_packed(
                sums, rows, x_rows, scale, zero, table, row, step, FORM, IN_FEATURES, GROUP_SIZE, NUM_GROUPS,
                TABLE_CODE, ASSEMBLE,
            )  # fmt: skip
        else:
            sums = _add_bytes(
                sums, rows, x_rows, scale, zero, row, step, FORM, IN_FEATURES, GROUP_SIZE, NUM_GROUPS, ASSEMBLE
            )
    product = sums.to(tl.float32)
    if NUM_GROUPS == 1:
        product *= tl.load(scale + row).to(tl.float32)[:, None]
    return product


@jit
def _add_packed(
    sums: Scalar,
    rows: Pointer,
    x_rows: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    row: Scalar,
    step: Scalar,
    FORM: constexpr,
    IN_FEATURES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TABLE_CODE: constexpr,
    ASSEMBLE: constexpr,
) -> Scalar:
    """64 bytes of each row: the lower halves are 64 columns, the upper ones the next 64."""
    column = step * 128
    codes = tl.load(rows + step * 64 + tl.arange(0, 64)[None, :], eviction_policy="evict_first")
    below = _load_columns(x_rows, column, IN_FEATURES, 64)
    above = _load_columns(x_rows, column + 64, IN_FEATURES, 64)
    if FORM == "int4":
        lower, upper = code_pairs(codes, below.dtype, ASSEMBLE)
        lower = _less_zero(lower, zero, row, column, 8, below.dtype, GROUP_SIZE, NUM_GROUPS, ASSEMBLE)
        upper = _less_zero(upper, zero, row, column + 64, 8, below.dtype, GROUP_SIZE, NUM_GROUPS, ASSEMBLE)
    else:
        lower, upper = table_pairs(codes, table, below.dtype, TABLE_CODE)
    if GROUP_SIZE < 64 and NUM_GROUPS > 1:
        lower = _times_scales(lower, scale, zero, row, column, GROUP_SIZE, NUM_GROUPS)
        upper = _times_scales(upper, scale, zero, row, column + 64, GROUP_SIZE, NUM_GROUPS)
        sums = tl.dot(upper, above, tl.dot(lower, below, sums))
    elif NUM_GROUPS == 1:
        sums = tl.dot(upper, above, tl.dot(lower, below, sums))
    elif GROUP_SIZE % 128 == 0:
        part = tl.dot(upper, above, tl.dot(lower, below))
        sums += part * _scale_of(scale, row, column, GROUP_SIZE, NUM_GROUPS)
    else:
        sums += tl.dot(lower, below) * _scale_of(scale, row, column, GROUP_SIZE, NUM_GROUPS)
        sums += tl.dot(upper, above) * _scale_of(scale, row, column + 64, GROUP_SIZE, NUM_GROUPS)
    return sums


@jit
def _add_bytes(
    sums: Scalar,
    rows: Pointer,
    x_rows: Pointer,
    scale: Pointer,
    zero: Pointer,
    row: Scalar,
    step: Scalar,
    FORM: constexpr,
    IN_FEATURES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    ASSEMBLE: constexpr,
) -> Scalar:
    """128 columns of 8 bits each."""
    column = step * 128
    place = column + tl.arange(0, 128)[None, :]
    if IN_FEATURES % 128 == 0:
        raw = tl.load(rows + place, eviction_policy="evict_first")
    else:
        raw = tl.load(rows + place, mask=place < IN_FEATURES, other=0.0, eviction_policy="evict_first")
    values = _load_columns(x_rows, column, IN_FEATURES, 128)
    left = converted(raw, FORM, values.dtype, ASSEMBLE)
    if FORM == "codes":
        left = _less_zero(left, zero, row, column, 128, values.dtype, GROUP_SIZE, NUM_GROUPS, ASSEMBLE)
    if NUM_GROUPS == 1 and left.dtype == tl.int8:
        sums = tl.dot(left, values, sums, out_dtype=tl.int32)
    elif NUM_GROUPS == 1:
        sums = tl.dot(left, values, sums)
    elif GROUP_SIZE % 128 != 0:
        sums = tl.dot(_times_scales(left, scale, zero, row, column, GROUP_SIZE, NUM_GROUPS), values, sums)
    elif left.dtype == tl.int8:
        part = tl.dot(left, values, out_dtype=tl.int32)
        sums += part.to(tl.float32) * _scale_of(scale, row, column, GROUP_SIZE, NUM_GROUPS)
    else:
        sums += tl.dot(left, values) * _scale_of(scale, row, column, GROUP_SIZE, NUM_GROUPS)
    return sums


@jit
def _load_columns(x_rows: Pointer, column: Scalar, IN_FEATURES: constexpr, COUNT: constexpr) -> Scalar:
    """[COUNT, rows]; zeros beyond the last column."""
    place = column + tl.arange(0, COUNT)[:, None]
    if IN_FEATURES % 128 == 0:
        values = tl.load(x_rows + place, eviction_policy="evict_last")
    else:
        values = tl.load(x_rows + place, mask=place < IN_FEATURES, other=0.0, eviction_policy="evict_last")
    return values


@jit
def _less_zero(
    numbers: Scalar,
    zero: Pointer,
    row: Scalar,
    column: Scalar,
    MIDDLE: constexpr,
    DTYPE: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    ASSEMBLE: constexpr,
) -> Scalar:
    """16-bit codes, those of 4 bits with the offset of `code_pairs`, less their zeros, exactly. Minima are left to
    `_times_scales`."""
    offset: tl.constexpr = 0 if MIDDLE == 128 else 128 if numbers.dtype == tl.bfloat16 else 1024
    if zero is None:
        less = minus(numbers, tl.full((), MIDDLE + offset, tl.float32), ASSEMBLE)
    elif zero.dtype.element_ty.is_floating():
        less = minus(numbers, tl.full((), offset, tl.float32), ASSEMBLE)
    else:
        if NUM_GROUPS == 1 or GROUP_SIZE % (64 if MIDDLE == 8 else 128) == 0:
            group = tl.minimum(column // GROUP_SIZE, NUM_GROUPS - 1)
            zeros = tl.load(zero + row * NUM_GROUPS + group)[:, None].to(tl.int16)
            less = minus(numbers, (zeros + offset).to(tl.float32), ASSEMBLE)
        else:
            place = _small_groups(row, column, numbers.shape[1], GROUP_SIZE, NUM_GROUPS)
            zeros = tl.load(zero + place).to(tl.int16)[:, :, None]
            each = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // GROUP_SIZE, GROUP_SIZE))
            less = tl.reshape(minus(each, (zeros + offset).to(tl.float32), ASSEMBLE), numbers.shape)
    return less.to(DTYPE)


@jit
def _scale_of(scale: Pointer, row: Scalar, column: Scalar, GROUP_SIZE: constexpr, NUM_GROUPS: constexpr) -> Scalar:
    group = tl.minimum(column // GROUP_SIZE, NUM_GROUPS - 1)
    return tl.load(scale + row * NUM_GROUPS + group).to(tl.float32)[:, None]


@jit
def _times_scales(
    numbers: Scalar,
    scale: Pointer,
    zero: Pointer,
    row: Scalar,
    column: Scalar,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
) -> Scalar:
    """Where 64 columns have several scales, the numbers are multiplied, minima are added, and the sum is rounded."""
    place = _small_groups(row, column, numbers.shape[1], GROUP_SIZE, NUM_GROUPS)
    scaled = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // GROUP_SIZE, GROUP_SIZE)).to(tl.float32)
    scaled *= tl.load(scale + place).to(tl.float32)[:, :, None]
    if zero is not None:  # noqa: SIM102  the compiler looks at both sides of an `and`
        if zero.dtype.element_ty.is_floating():
            scaled += tl.load(zero + place).to(tl.float32)[:, :, None]
    return tl.reshape(scaled.to(numbers.dtype), numbers.shape)


@jit
def _small_groups(
    row: Scalar, column: Scalar, COUNT: constexpr, GROUP_SIZE: constexpr, NUM_GROUPS: constexpr
) -> Scalar:
    """Where the scales of COUNT columns are, [rows, groups]: loaded for each number, they would cost more instructions
    than unpacking it, and as much shared memory as 16-bit numbers."""
    group = tl.minimum(column // GROUP_SIZE + tl.arange(0, COUNT // GROUP_SIZE), NUM_GROUPS - 1)
    return row[:, None] * NUM_GROUPS + group[None, :]


@jit
def _store_transposed(
    out: Pointer,
    tile: Scalar,
    product: Scalar,
    m: Scalar,
    num_rows: Scalar,
    WIDTH: constexpr,
    ACTIVATION: constexpr,
) -> None:
    """[rows of the matrix, rows of x], rounded."""
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = tile * rounded.shape[0] + tl.arange(0, rounded.shape[0])[:, None]
    place = m.to(tl.int64)[None, :] * out_width + feature
    tl.store(out + place, rounded, mask=(feature < out_width) & (m < num_rows)[None, :])
