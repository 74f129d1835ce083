"""One row times a quantized matrix, limited by memory bandwidth.

A thread reads words of four bytes of some rows of the matrix, and the four columns of x that belong to a word as one
number of 64 bits. So both have the same layout, and nothing moves between threads before the sums of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.device import limits_of
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, is_interpreted, jit, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.assembly import fp8_numbers
from legato.kernels.quantized.operand import Operand, factor_of_column, number_of_word, undo_number
from legato.kernels.quantized.table import table_numbers


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    tile_rows: int  # rows of the matrix per program
    num_words: int  # of every row at once: two for each thread
    num_warps: int


# Rows of a matrix of which every multiprocessor of a large GPU gets many tiles.
MANY_OUTPUTS = 16_384


def one_row_config(operand: Operand) -> OneRowConfig:
    """The fastest, or nearly, of 20 on an H200 (`python -m benchmarks.quantized --part sweep --rows 1`)."""
    num_words, is_wide = operand.numbers.shape[1] // 4, operand.out_features >= MANY_OUTPUTS
    if operand.is_packed:
        if is_wide:
            return OneRowConfig(tile_rows=16, num_words=128, num_warps=2)
        return OneRowConfig(tile_rows=8, num_words=512, num_warps=8 if num_words % 512 == 0 else 4)
    if is_wide and num_words % 1024 == 0:
        return OneRowConfig(tile_rows=8, num_words=1024, num_warps=8)
    if num_words % 512 == 0:
        return OneRowConfig(tile_rows=4, num_words=512, num_warps=8)
    return OneRowConfig(tile_rows=4, num_words=256, num_warps=4)


def one_row_linear(
    x: Tensor,  # [1, in_features], in 16 bits
    operand: Operand,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    config: OneRowConfig | None = None,
) -> Tensor:
    assert x.shape == (1, operand.in_features) and x.is_contiguous(), (x.shape, x.stride(), operand.in_features)
    config = config or one_row_config(operand)
    width, group = operand.out_features, operand.group_size
    out = torch.empty(1, width if activation is None else width // 2, dtype=x.dtype, device=x.device)
    _one_row_kernel[(ceil_div(width, config.tile_rows),)](
        out,
        x.view(torch.int64),
        operand.numbers.view(torch.int32),
        operand.scale,
        operand.zero,
        operand.table_tensor,
        bias,
        FORM=operand.form,
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        WIDTH=width,
        IN_FEATURES=operand.in_features,
        ROW_WORDS=operand.numbers.shape[1] // 4,
        GROUP_SIZE=group,
        NUM_GROUPS=operand.num_groups,
        TILE_ROWS=config.tile_rows,
        WORDS=config.num_words,
        IS_WHOLE=operand.in_features % (config.num_words * (8 if operand.is_packed else 4)) == 0,
        TABLE_CODE=operand.lookup_code,
        CONVERTS=operand.form == "fp8" and limits_of(x).sm >= 89 and not is_interpreted(),
        ACTIVATION=activation,
        num_warps=config.num_warps,
        **launch_options(x),
    )
    return out


@jit
def _one_row_kernel(
    out: Pointer,
    x: Pointer,
    words: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    bias: Pointer,
    FORM: constexpr,
    DTYPE: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    ROW_WORDS: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TILE_ROWS: constexpr,
    WORDS: constexpr,
    IS_WHOLE: constexpr,
    TABLE_CODE: constexpr,
    CONVERTS: constexpr,
    ACTIVATION: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies some rows of the matrix with x."""
    tile = tl.program_id(0)
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION).to(tl.int64)
    rows = words + row[:, None] * ROW_WORDS
    scales = scale + row[:, None] * NUM_GROUPS
    zeros = zero if zero is None else zero + row[:, None] * NUM_GROUPS
    # Words whose sum has one scale; 1: all of a row have, and it multiplies the result.
    packed: tl.constexpr = FORM == "int4" or FORM == "table"
    whole: tl.constexpr = GROUP_SIZE % 128 == 0 or NUM_GROUPS == 1
    late: tl.constexpr = not packed and NUM_GROUPS == 1 and zero is None
    size: tl.constexpr = 1 if late else (16 if packed else 32) if whole else GROUP_SIZE // 4
    sums = tl.zeros((TILE_ROWS, WORDS // size), dtype=tl.float32)
    loaded = _load_words(rows, 0, ROW_WORDS, WORDS)
    wait_for_previous(OVERLAP)
    for start in range(0, ROW_WORDS, WORDS):
        following = _load_words(rows, start + WORDS, ROW_WORDS, WORDS)
        if packed:
            sums += _packed_products(
                loaded, x, scales, zeros, table, start, FORM, IN_FEATURES, GROUP_SIZE, NUM_GROUPS, WORDS, IS_WHOLE,
                TABLE_CODE, DTYPE,
            )  # fmt: skip
        else:
            columns = _load_columns(x, start + tl.arange(0, WORDS), IN_FEATURES, IS_WHOLE)
            if CONVERTS:
                each, each_sum = _converted_products(loaded, columns, DTYPE), None
            else:
                each, each_sum = _products(loaded, columns, FORM, 0, DTYPE)
            form: tl.constexpr = "table" if CONVERTS else FORM  # of which nothing has to be undone
            if late:
                sums += undo_number(each, None if each_sum is None else each_sum[None, :], None, form)
            else:
                group = (start // size + tl.arange(0, WORDS // size)) * (4 * size) // GROUP_SIZE
                sums += _of_groups(each, each_sum, scales, zeros, group, size, form, NUM_GROUPS)
        loaded = following
    product = tl.sum(sums, axis=1)
    if late:
        product *= tl.load(scale + row).to(tl.float32)
    if bias is not None:
        product += tl.load(bias + row).to(tl.float32)
    _store(out, tile, product[:, None], WIDTH, ACTIVATION)


@jit
def _packed_products(
    words: Scalar,
    x: Pointer,
    scales: Pointer,
    zeros: Pointer,
    table: Pointer,
    start: Scalar,
    FORM: constexpr,
    IN_FEATURES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    WORDS: constexpr,
    IS_WHOLE: constexpr,
    TABLE_CODE: constexpr,
    DTYPE: constexpr,
) -> Scalar:
    """[rows, words] from word `start` of each row on -> [rows, groups]. Sixteen words have the codes of 128 columns,
    the upper halves of their bytes those of the second 64."""
    word = start + tl.arange(0, WORDS)
    four = word // 16 * 32 + word % 16
    below = _load_columns(x, four, IN_FEATURES, IS_WHOLE)
    above = _load_columns(x, four + 16, IN_FEATURES, IS_WHOLE)
    if FORM == "int4":
        lower, lower_sum = _products(words, below, FORM, 0, DTYPE)
        upper, upper_sum = _products(words, above, FORM, 1, DTYPE)
    else:
        lower, upper = _table_products(words, below, above, table, TABLE_CODE, DTYPE)
        lower_sum, upper_sum = None, None
    if GROUP_SIZE % 128 == 0 or NUM_GROUPS == 1:
        group = (start // 16 + tl.arange(0, WORDS // 16)) * 128 // GROUP_SIZE
        both_sum = lower_sum if lower_sum is None else lower_sum + upper_sum
        product = _of_groups(lower + upper, both_sum, scales, zeros, group, 16, FORM, NUM_GROUPS)
    else:
        size: tl.constexpr = GROUP_SIZE // 4  # words
        share: tl.constexpr = 16 // size  # groups of 64 columns
        index = start // size + tl.arange(0, WORDS // size)
        group = index // share * (2 * share) + index % share
        product = _of_groups(lower, lower_sum, scales, zeros, group, size, FORM, NUM_GROUPS)
        product += _of_groups(upper, upper_sum, scales, zeros, group + share, size, FORM, NUM_GROUPS)
    return product


@jit
def _load_words(rows: Pointer, start: Scalar, ROW_WORDS: constexpr, WORDS: constexpr) -> Scalar:
    """[rows, words] from word `start` of each row on, read once and by this program alone; zeros behind the end."""
    word = (start + tl.arange(0, WORDS))[None, :]
    inside = start < ROW_WORDS if ROW_WORDS % WORDS == 0 else word < ROW_WORDS
    # Two words for a thread, as many as it reads columns of x at once.
    pointers = tl.multiple_of(rows + word, (1, 8))
    return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")


@jit
def _load_columns(x: Pointer, four: Scalar, IN_FEATURES: constexpr, IS_WHOLE: constexpr) -> Scalar:
    """Numbers of 64 bits with four columns each; zeros beyond the last column."""
    if IS_WHOLE:
        inputs = tl.load(x + four, eviction_policy="evict_last")
    else:
        inputs = tl.load(x + four, mask=four * 4 < IN_FEATURES, other=0, eviction_policy="evict_last")
    return inputs


@jit
def _column(inputs: Scalar, K: constexpr, DTYPE: constexpr) -> Scalar:
    return (inputs >> (16 * K)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@jit
def _products(words: Scalar, inputs: Scalar, FORM: constexpr, UPPER: constexpr, DTYPE: constexpr) -> Scalar:
    """Sums [rows, words] of the products of the numbers in each word, as `number_of_word` has them, with columns of x,
    and sums [words] of these columns."""
    total = tl.zeros(inputs.shape, dtype=tl.float32)
    sums = tl.zeros(words.shape, dtype=tl.float32)
    for k in tl.static_range(4):
        value = _column(inputs, k, DTYPE)
        total += value
        value *= factor_of_column(k, FORM, UPPER)
        sums += number_of_word(words, k, FORM, UPPER) * value[None, :]
    return sums, total


@jit
def _converted_products(words: Scalar, inputs: Scalar, DTYPE: constexpr) -> Scalar:
    """The same with fp8, of the numbers themselves."""
    numbers = fp8_numbers(words)
    sums = tl.zeros(words.shape, dtype=tl.float32)
    for k in tl.static_range(4):
        sums += numbers[k] * _column(inputs, k, DTYPE)[None, :]
    return sums


@jit
def _table_products(
    words: Scalar, below: Scalar, above: Scalar, table: Pointer, CODE: constexpr, DTYPE: constexpr
) -> Scalar:
    """The same for lower and upper halves."""
    numbers = table_numbers(words, table, CODE)
    lower = tl.zeros(words.shape, dtype=tl.float32)
    upper = tl.zeros(words.shape, dtype=tl.float32)
    for k in tl.static_range(4):
        lower += numbers[k] * _column(below, k, DTYPE)[None, :]
        upper += numbers[k + 4] * _column(above, k, DTYPE)[None, :]
    return lower, upper


@jit
def _of_groups(
    sums: Scalar,
    totals: Scalar,
    scales: Pointer,
    zeros: Pointer,
    group: Scalar,
    SIZE: constexpr,
    FORM: constexpr,
    NUM_GROUPS: constexpr,
) -> Scalar:
    """[rows, words] -> [rows, groups]: sums of SIZE words each, scaled with the scales of their groups."""
    count: tl.constexpr = sums.shape[1] // SIZE
    each = tl.sum(tl.reshape(sums, (sums.shape[0], count, SIZE)), axis=2)
    total = totals if totals is None else tl.sum(tl.reshape(totals, (count, SIZE)), axis=1)[None, :]
    there = (group < NUM_GROUPS)[None, :]
    scale = tl.load(scales + group[None, :], mask=there, other=0.0).to(tl.float32)
    if zeros is None:
        product = undo_number(each, total, None, FORM) * scale
    else:
        zero = tl.load(zeros + group[None, :], mask=there, other=0).to(tl.float32)
        if zeros.dtype.element_ty.is_floating():  # minima
            product = undo_number(each, total, 0.0, FORM) * scale + zero * total
        else:
            product = undo_number(each, total, zero, FORM) * scale
    return product


@jit
def _store(out: Pointer, tile: Scalar, product: Scalar, WIDTH: constexpr, ACTIVATION: constexpr) -> None:
    """[rows of the matrix, 1], rounded."""
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = (tile * rounded.shape[0] + tl.arange(0, rounded.shape[0]))[:, None]
    tl.store(out + feature, rounded, mask=feature < out_width)
