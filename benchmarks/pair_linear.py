"""A candidate for products of 2 or 4 rows: multiply-adds, as `small_linear` has them for one. The server has no use of
it."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.small_linear import LinearConfig, _load_weights


def pair_linear(x: Tensor, weight: Tensor, config: LinearConfig, activation: Activation | None = None) -> Tensor:
    """x [2 or 4, in_features], a multiple of the block."""
    (num_rows, in_features), width = x.shape, weight.shape[0]
    assert num_rows in (2, 4) and in_features % config.block_k == 0, (x.shape, config)
    out_width = width if activation is None else width // 2
    out = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    _pair_kernel[(ceil_div(width, config.tile_rows),)](
        out,
        x,
        weight,
        x.stride(0),
        ROWS=num_rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        TILE_ROWS=config.tile_rows,
        BLOCK_K=config.block_k,
        ACTIVATION=activation,
        num_warps=config.num_warps,
        **launch_options(x),
    )
    return out


@jit
def _pair_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    x_stride: Scalar,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    ACTIVATION: constexpr,
    OVERLAP: constexpr,
) -> None:
    tile = tl.program_id(0)
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    rows = weight + row.to(tl.int64) * IN_FEATURES
    sums = tl.zeros((TILE_ROWS, BLOCK_K // 8), dtype=tl.float32)
    second = sums
    third = sums
    fourth = sums
    weights = _load_weights(rows, 0, IN_FEATURES, IN_FEATURES, BLOCK_K)
    wait_for_previous(OVERLAP)
    for start in range(0, IN_FEATURES, BLOCK_K):
        following = _load_weights(rows, start + BLOCK_K, IN_FEATURES, IN_FEATURES, BLOCK_K)
        wide = weights.to(tl.float32)
        columns = x + start
        sums += _products(wide, columns)
        second += _products(wide, columns + x_stride)
        if ROWS > 2:
            third += _products(wide, columns + 2 * x_stride)
            fourth += _products(wide, columns + 3 * x_stride)
        weights = following
    _store_row(out, sums, tile, 0, WIDTH, ACTIVATION)
    _store_row(out, second, tile, 1, WIDTH, ACTIVATION)
    if ROWS > 2:
        _store_row(out, third, tile, 2, WIDTH, ACTIVATION)
        _store_row(out, fourth, tile, 3, WIDTH, ACTIVATION)


@jit
def _products(wide: Scalar, columns: Pointer) -> Scalar:
    """Eight neighbours of a row of the weight belong to one thread, which adds them up at once."""
    values = tl.load(columns + tl.arange(0, wide.shape[1]), eviction_policy="evict_last").to(tl.float32)
    return tl.sum(tl.reshape(wide * values[None, :], (wide.shape[0], wide.shape[1] // 8, 8)), axis=2)


@jit
def _store_row(out: Pointer, sums: Scalar, tile: Scalar, m: constexpr, WIDTH: constexpr, ACTIVATION: constexpr) -> None:
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = tl.sum(sums, axis=1)[:, None].to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = (tile * rounded.shape[0] + tl.arange(0, rounded.shape[0]))[:, None]
    tl.store(out + m * out_width + feature, rounded, mask=feature < out_width)
