"""A linear layer for a handful of rows, where reading the weights once at full bandwidth is all that counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit,
    next_power_of_two,
    padded,
    runs_triton,
    tl,
    widened,
)
from legato.kernels.overlap import launch_options, wait_for_previous

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class LinearConfig:
    tile_rows: int  # rows of the weight per program
    block_k: int
    num_warps: int
    split_k: int = 1
    use_dot: bool = False  # matrix units; without them only one row of x
    num_stages: int = 1  # blocks in flight in shared memory, for the matrix units


def linear_config(num_rows: int, out_features: int, in_features: int) -> LinearConfig:
    """The best of a sweep on an H200 (`python -m benchmarks.kernels --sweep --only small_linear`)."""
    if num_rows > 1:
        return LinearConfig(tile_rows=64, block_k=128, num_warps=4, num_stages=6, use_dot=True)
    # Where blocks do not fill a row of the weight, those who load its end are masked: small blocks waste less.
    if in_features > 8192:
        if in_features % 1024:
            return LinearConfig(tile_rows=2, block_k=512, num_warps=2)
        return LinearConfig(tile_rows=4, block_k=1024, num_warps=4)
    if in_features % 2048:
        return LinearConfig(tile_rows=1, block_k=1024, num_warps=8)
    return LinearConfig(tile_rows=4 if out_features > 65536 else 2, block_k=2048, num_warps=8)


def small_linear(
    x: Tensor,  # [m, in_features], m <= MAX_ROWS
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    config: LinearConfig | None = None,
) -> Tensor:
    assert x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype, (x.stride(), weight.stride())
    run = _small_linear_triton if runs_triton(x) else _small_linear_torch
    return run(x, weight, bias, config)


def _small_linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None, config: LinearConfig | None = None) -> Tensor:
    """In fp32, or in float64 for float64 tensors, rounded once. `config` has no say here."""
    return F.linear(widened(x), widened(weight), None if bias is None else widened(bias)).to(x.dtype)


def _small_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, config: LinearConfig | None = None) -> Tensor:
    num_rows, in_features = x.shape
    width = weight.shape[0]
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    config = config or linear_config(num_rows, width, in_features)
    split_k = config.split_k
    num_tiles = ceil_div(width, config.tile_rows)
    assert split_k == 1 or num_tiles <= NUM_COUNTERS, num_tiles
    part_size = config.tile_rows * next_power_of_two(num_rows, 8) if split_k > 1 else 0
    _small_linear_kernel[(num_tiles, split_k)](
        out,
        x,
        weight,
        bias,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device),
        x.stride(0),
        NUM_ROWS=num_rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        TILE_ROWS=config.tile_rows,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        USE_DOT=config.use_dot or num_rows > 1,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **launch_options(x),
    )
    return out


@jit
def _small_linear_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    parts: Pointer,
    counters: Pointer,
    x_stride: Scalar,
    NUM_ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    USE_DOT: constexpr,
    STAGES: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies some rows of the weight with all rows of x."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    # Beyond the last feature the last is computed again, which spares the loads a mask.
    row = tl.minimum(tile * TILE_ROWS + r, WIDTH - 1)
    rows = weight + row.to(tl.int64) * IN_FEATURES
    if USE_DOT:
        wait_for_previous(OVERLAP)
        product = _multiply_matrix(x, x_stride, rows, begin, end, NUM_ROWS, IN_FEATURES, BLOCK_K, STAGES)
    else:
        product = multiply_vector(x, rows, begin, end, IN_FEATURES, BLOCK_K, OVERLAP)
    if bias is not None:
        product += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if SPLIT_K == 1:
        _store(out, tile * TILE_ROWS, product, NUM_ROWS, WIDTH)
    else:
        place = r[:, None] * product.shape[1] + tl.arange(0, product.shape[1])[None, :]
        size: tl.constexpr = TILE_ROWS * product.shape[1]
        tl.store(parts + (tile * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros(product.shape, dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (tile * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _store(out, tile * TILE_ROWS, product, NUM_ROWS, WIDTH)


@jit
def multiply_vector(
    x: Pointer,
    rows: Pointer,
    begin: Scalar,
    end: Scalar,
    IN_FEATURES: constexpr,
    BLOCK_K: constexpr,
    OVERLAP: constexpr,
) -> Scalar:
    """Every thread adds up its own columns; they meet once, behind the loop. Returns [rows, 1].

    Weights are loaded one block ahead, the first ones before x is known to be ready.
    """
    sums = tl.zeros((rows.shape[0], BLOCK_K), dtype=tl.float32)
    weights = _load_weights(rows, begin, end, IN_FEATURES, BLOCK_K)
    wait_for_previous(OVERLAP)
    for start in range(begin, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        values = _load_columns(x + column, column, IN_FEATURES, BLOCK_K).to(tl.float32)
        following = _load_weights(rows, start + BLOCK_K, end, IN_FEATURES, BLOCK_K)
        sums += weights.to(tl.float32) * values[None, :]
        weights = following
    return tl.sum(sums, axis=1)[:, None]


@jit
def _multiply_matrix(
    x: Pointer,
    x_stride: Scalar,
    rows: Pointer,
    begin: Scalar,
    end: Scalar,
    NUM_ROWS: constexpr,
    IN_FEATURES: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
) -> Scalar:
    """The weight is the left, larger operand, so that few rows of x waste little. Returns [rows, rows of x]."""
    # Rows of x that are not there repeat the last: their products are never stored.
    first = tl.minimum(tl.arange(0, padded(NUM_ROWS, 8)), NUM_ROWS - 1) * x_stride
    product = tl.zeros((rows.shape[0], first.shape[0]), dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        column = (start + tl.arange(0, BLOCK_K))[:, None]
        values = _load_columns(x + first[None, :] + column, column, IN_FEATURES, BLOCK_K)
        weights = _load_weights(rows, start, end, IN_FEATURES, BLOCK_K)
        product = tl.dot(weights, values, product, input_precision="ieee")
    return product


@jit
def _load_columns(pointers: Pointer, column: Scalar, IN_FEATURES: constexpr, BLOCK_K: constexpr) -> Scalar:
    """Of x, which all programs read; zeros beyond the last column."""
    if IN_FEATURES % BLOCK_K == 0:
        values = tl.load(pointers, eviction_policy="evict_last")
    else:
        values = tl.load(pointers, mask=column < IN_FEATURES, other=0.0, eviction_policy="evict_last")
    return values


@jit
def _load_weights(rows: Pointer, start: Scalar, end: Scalar, IN_FEATURES: constexpr, BLOCK_K: constexpr) -> Scalar:
    """A block of columns, read once and by this program alone; zeros behind `end`."""
    column = (start + tl.arange(0, BLOCK_K))[None, :]
    inside = start < end
    if IN_FEATURES % BLOCK_K != 0:
        inside = inside & (column < IN_FEATURES)
    return tl.load(rows[:, None] + column, mask=inside, other=0.0, eviction_policy="evict_first")


@jit
def _store(out: Pointer, first_feature: Scalar, product: Scalar, NUM_ROWS: constexpr, WIDTH: constexpr) -> None:
    """Rounded, and [rows of the weight, rows of x] transposed."""
    feature = first_feature + tl.arange(0, product.shape[0])[:, None]
    m = tl.arange(0, product.shape[1])[None, :]
    inside = (feature < WIDTH) & (m < NUM_ROWS)
    tl.store(out + m * WIDTH + feature, product.to(out.dtype.element_ty), mask=inside)
