"""A linear layer for a handful of rows, where reading the weights once at full bandwidth is all that counts.

At such sizes a launch costs as much as the work beside the product, so the work can come along: the RMS norm of the
input, the bias, the gate of a gated MLP, the residual addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.activation import Activation, activate, activate_torch
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
    if in_features > 8192:
        return LinearConfig(tile_rows=4, block_k=1024, num_warps=4, num_stages=1)
    tile_rows = 4 if out_features > 65536 else 2
    return LinearConfig(tile_rows=tile_rows, block_k=2048, num_warps=8, num_stages=1)


def small_linear(
    x: Tensor,  # [m, in_features], m <= MAX_ROWS
    weight: Tensor,  # [out_features, in_features]; with an activation the gate's rows, then the others'
    bias: Tensor | None = None,  # [out_features]
    *,
    norm_weight: Tensor | None = None,  # [in_features]: x is normalized first, without rounding in between
    eps: float = 0.0,
    activation: Activation | None = None,  # the result is activation(gate) * up, half as wide
    residual: Tensor | None = None,  # added to the result, shaped like it
    config: LinearConfig | None = None,
) -> Tensor:
    assert x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype, (x.stride(), weight.stride())
    assert activation is None or weight.shape[0] % 2 == 0, weight.shape
    width = weight.shape[0] // (1 if activation is None else 2)
    assert residual is None or (residual.shape == (x.shape[0], width) and residual.stride(1) == 1), residual.shape
    run = _small_linear_triton if runs_triton(x) else _small_linear_torch
    return run(x, weight, bias, norm_weight, eps, activation, residual, config)


def _small_linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation | None,
    residual: Tensor | None,
    config: LinearConfig | None = None,
) -> Tensor:
    """In fp32, or in float64 for float64 tensors, rounded once. `config` has no say here."""
    wide = widened(x)
    if norm_weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widened(norm_weight)
    out = F.linear(wide, widened(weight), None if bias is None else widened(bias))
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = activate_torch(gate, activation) * up
    return (out if residual is None else out + widened(residual)).to(x.dtype)


def _small_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation | None,
    residual: Tensor | None,
    config: LinearConfig | None = None,
) -> Tensor:
    num_rows, in_features = x.shape
    halves = 1 if activation is None else 2
    width = weight.shape[0] // halves
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    config = config or linear_config(num_rows, weight.shape[0], in_features)
    # A split sees only its part of x, so it cannot know the norm.
    split_k = 1 if norm_weight is not None else config.split_k
    num_tiles = ceil_div(width, config.tile_rows // halves)
    assert split_k == 1 or num_tiles <= NUM_COUNTERS, num_tiles
    part_size = config.tile_rows * next_power_of_two(num_rows, 8) if split_k > 1 else 0
    _small_linear_kernel[(num_tiles, split_k)](
        out,
        x,
        weight,
        bias,
        norm_weight,
        residual,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device),
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        NUM_ROWS=num_rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        ACTIVATION=activation,
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
    norm_weight: Pointer,
    residual: Pointer,
    parts: Pointer,
    counters: Pointer,
    eps: float,
    x_stride: Scalar,
    residual_stride: Scalar,
    NUM_ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    ACTIVATION: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    USE_DOT: constexpr,
    STAGES: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies some rows of the weight (of gate and up: as many of each) with all rows of x."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    halves: tl.constexpr = 1 if ACTIVATION is None else 2
    features: tl.constexpr = TILE_ROWS // halves
    # Beyond the last feature the last is computed again, which spares the loads a mask.
    row = tl.minimum(tile * features + r % features, WIDTH - 1) + r // features * WIDTH
    rows = weight + row.to(tl.int64) * IN_FEATURES
    if USE_DOT:
        wait_for_previous(OVERLAP)
        product = _multiply_matrix(
            x, x_stride, rows, norm_weight, eps, begin, end, NUM_ROWS, IN_FEATURES, BLOCK_K, STAGES
        )
    else:
        product = _multiply_vector(x, rows, norm_weight, eps, begin, end, IN_FEATURES, BLOCK_K, OVERLAP)
    if bias is not None:
        product += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if SPLIT_K == 1:
        _finish(out, residual, residual_stride, tile * features, product, NUM_ROWS, WIDTH, ACTIVATION)
    else:
        place = r[:, None] * product.shape[1] + tl.arange(0, product.shape[1])[None, :]
        size: tl.constexpr = TILE_ROWS * product.shape[1]
        tl.store(parts + (tile * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros(product.shape, dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (tile * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _finish(out, residual, residual_stride, tile * features, product, NUM_ROWS, WIDTH, ACTIVATION)


@jit
def _multiply_vector(
    x: Pointer,
    rows: Pointer,
    norm_weight: Pointer,
    eps: Scalar,
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
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    weights = _load_weights(rows, begin, end, IN_FEATURES, BLOCK_K)
    wait_for_previous(OVERLAP)
    for start in range(begin, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        values = _load_columns(x + column, column, IN_FEATURES, BLOCK_K).to(tl.float32)
        if norm_weight is not None:
            squares += values * values
            values *= _load_columns(norm_weight + column, column, IN_FEATURES, BLOCK_K).to(tl.float32)
        following = _load_weights(rows, start + BLOCK_K, end, IN_FEATURES, BLOCK_K)
        sums += weights.to(tl.float32) * values[None, :]
        weights = following
    product = tl.sum(sums, axis=1)
    if norm_weight is not None:
        product *= tl.rsqrt(tl.sum(squares, axis=0) / IN_FEATURES + eps)
    return product[:, None]


@jit
def _multiply_matrix(
    x: Pointer,
    x_stride: Scalar,
    rows: Pointer,
    norm_weight: Pointer,
    eps: Scalar,
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
    squares = tl.zeros((first.shape[0],), dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        column = (start + tl.arange(0, BLOCK_K))[:, None]
        values = _load_columns(x + first[None, :] + column, column, IN_FEATURES, BLOCK_K)
        if norm_weight is not None:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            wide *= _load_columns(norm_weight + column, column, IN_FEATURES, BLOCK_K).to(tl.float32)
            values = wide.to(values.dtype)
        weights = _load_weights(rows, start, end, IN_FEATURES, BLOCK_K)
        product = tl.dot(weights, values, product, input_precision="ieee")
    if norm_weight is not None:
        product *= tl.rsqrt(squares / IN_FEATURES + eps)[None, :]
    return product


@jit
def _load_columns(pointers: Pointer, column: Scalar, IN_FEATURES: constexpr, BLOCK_K: constexpr) -> Scalar:
    """Something as long as x, which all programs read; zeros beyond the last column."""
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
def _finish(
    out: Pointer,
    residual: Pointer,
    residual_stride: Scalar,
    first_feature: Scalar,
    product: Scalar,
    NUM_ROWS: constexpr,
    WIDTH: constexpr,
    ACTIVATION: constexpr,
) -> None:
    """Gate, add the residual, round and store: [rows of the weight, rows of x], transposed."""
    columns: tl.constexpr = product.shape[1]
    if ACTIVATION is None:
        value = product
    else:
        gate, up = tl.split(tl.permute(tl.reshape(product, (2, product.shape[0] // 2, columns)), (1, 2, 0)))
        value = activate(gate, ACTIVATION) * up
    feature = first_feature + tl.arange(0, value.shape[0])[:, None]
    m = tl.arange(0, columns)[None, :]
    inside = (feature < WIDTH) & (m < NUM_ROWS)
    if residual is not None:
        value += tl.load(residual + m * residual_stride + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * WIDTH + feature, value.to(out.dtype.element_ty), mask=inside)
