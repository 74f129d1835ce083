"""As `grouped_linear`, with quantized matrices of all experts above each other. Weight-only, however many rows there
are: an expert has few of them."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.device import limits_of
from legato.kernels.grouped_linear import Groups, find_tile
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    is_interpreted,
    jit,
    next_power_of_two,
    tl,
)
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.linear import tiled_config
from legato.kernels.quantized.operand import Operand
from legato.kernels.quantized.tiled import TiledConfig, tile_sums


def grouped_quantized_linear(
    x: Tensor,  # [T k, in_features], or [T, in_features] where the k rows of a token are the same
    operand: Operand,  # [num_experts out_features, in_features]
    groups: Groups,
    scale: Tensor | None = None,  # [T k], multiplies the rows of the result
    config: TiledConfig | None = None,
) -> Tensor:
    num_rows, num_experts = groups.ids.numel(), groups.num_experts
    out_features = operand.out_features // num_experts
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    config = config or grouped_quantized_config(num_rows, num_experts, operand, x)
    # The most tiles: every expert that can have a row has one, and all other rows fill tiles of their own.
    most_used = min(num_experts, num_rows)
    num_tiles = most_used + (num_rows - most_used) // config.rows
    _grouped_quantized_kernel[(num_tiles, ceil_div(out_features, config.tile_rows))](
        out,
        x,
        operand.numbers_for(x.dtype),
        operand.scale,
        operand.zero,
        operand.table_tensor,
        groups.order,
        groups.starts,
        scale,
        x.stride(0),
        NUM_EXPERTS=num_experts,
        SHARE=num_rows // x.shape[0],
        FORM=operand.form,
        ROWS=config.rows,
        WIDTH=out_features,
        IN_FEATURES=operand.in_features,
        ROW_BYTES=operand.numbers.shape[1],
        GROUP_SIZE=operand.group_size,
        NUM_GROUPS=operand.num_groups,
        TILE_ROWS=config.tile_rows,
        STAGES=config.num_stages,
        TABLE_CODE=operand.pair_code(x.dtype),
        ASSEMBLE=not is_interpreted(),
        num_warps=config.num_warps,
        **launch_options(x),
    )
    return out


def grouped_quantized_config(num_rows: int, num_experts: int, operand: Operand, x: Tensor) -> TiledConfig:
    """By the rows that an expert has on average."""
    mean = max(1, num_rows // num_experts)
    return tiled_config(min(next_power_of_two(mean, 8), 64), operand, x.element_size(), limits_of(x))


@jit
def _grouped_quantized_kernel(
    out: Pointer,
    x: Pointer,
    numbers: Pointer,
    scale: Pointer,
    zero: Pointer,
    table: Pointer,
    order: Pointer,
    starts: Pointer,
    row_scale: Pointer,
    x_stride: Scalar,
    NUM_EXPERTS: constexpr,
    SHARE: constexpr,
    FORM: constexpr,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    ROW_BYTES: constexpr,
    GROUP_SIZE: constexpr,
    NUM_GROUPS: constexpr,
    TILE_ROWS: constexpr,
    STAGES: constexpr,
    TABLE_CODE: constexpr,
    ASSEMBLE: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    expert, first, last = find_tile(starts, tl.program_id(0), NUM_EXPERTS, ROWS)
    if expert >= NUM_EXPERTS:
        return
    place = first + tl.arange(0, ROWS)
    # Rows and features that are not there repeat the last, which spares the loads a mask; they are not stored.
    source = tl.load(order + tl.minimum(place, last - 1)).to(tl.int64)
    feature = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = expert.to(tl.int64) * WIDTH + tl.minimum(feature, WIDTH - 1)
    num_steps: tl.constexpr = (IN_FEATURES + 127) // 128
    product = tile_sums(
        numbers, x + (source // SHARE * x_stride)[None, :], scale, zero, table, row, 0, num_steps, FORM, ROWS,
        IN_FEATURES, ROW_BYTES, GROUP_SIZE, NUM_GROUPS, TILE_ROWS, STAGES, TABLE_CODE, ASSEMBLE,
    )  # fmt: skip
    if row_scale is not None:
        product *= tl.load(row_scale + source).to(tl.float32)[None, :]
    there = (feature < WIDTH)[:, None] & (place < last)[None, :]
    tl.store(out + source[None, :] * WIDTH + feature[:, None], product.to(out.dtype.element_ty), mask=there)
