"""A linear layer for a few rows, limited by the bandwidth of reading the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_mul, gate_and_up, weight_rows
from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.few_linear import MAX_ROWS, FewConfig, few_linear
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    is_available,
    jit,
    kernel_or_torch,
    tl,
    widened,
)
from legato.kernels.overlap import launch_options, wait_for_previous


@dataclass(frozen=True, slots=True)
class LinearConfig:
    tile_rows: int  # rows of the weight per program
    block_k: int
    num_warps: int
    split_k: int = 1


def linear_config(out_features: int, in_features: int) -> LinearConfig:
    """For one row. The best of a sweep on an H200 (`python -m benchmarks.kernels --sweep --only small_linear`)."""
    # Where blocks do not fill a row of the weight, those who load its end are masked: small blocks waste less.
    if in_features > 8192:
        if in_features % 1024:
            return LinearConfig(tile_rows=2, block_k=512, num_warps=2)
        return LinearConfig(tile_rows=4, block_k=1024, num_warps=4)
    if in_features % 2048:
        return LinearConfig(tile_rows=1, block_k=1024, num_warps=8)
    return LinearConfig(tile_rows=4 if out_features > 65536 else 2, block_k=2048, num_warps=8)


def pays(x: Tensor) -> bool:
    """Whether our kernels are faster than cuBLAS. Beyond one row that is measured where launches overlap, in 16 bits.

    2 / 4 / 8 / 16 streams of an 8B model on an H200 came to 442 / 869 / 1,684 / 3,228 tok/s with cuBLAS, and come to
    486 / 943 / 1,839 / 3,438.
    """
    if x.shape[0] <= 1:
        return is_available(_small_linear_triton, x)
    if x.shape[0] > MAX_ROWS or x.dtype.itemsize != 2 or not is_available(few_linear, x):
        return False
    return launch_options(x)["OVERLAP"]


def small_linear(
    x: Tensor,  # [m, in_features], m <= MAX_ROWS
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    config: LinearConfig | None = None,  # of one row
    activation: Activation | None = None,  # the weight is gate and up: [m, out_features / 2], as `gate_and_mul` has it
) -> Tensor:
    assert x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype, (x.stride(), weight.stride())
    if x.shape[0] > 1:
        return kernel_or_torch(x, few_linear, _few_linear_torch)(x, weight, bias, None, activation)
    return kernel_or_torch(x, _small_linear_triton, _small_linear_torch)(x, weight, bias, config, activation)


def _few_linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: FewConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    return _small_linear_torch(x, weight, bias, None, activation)


def _small_linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: LinearConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """In fp32, or in float64 for float64 tensors, rounded once."""
    product = F.linear(widened(x), widened(weight), None if bias is None else widened(bias)).to(x.dtype)
    return product if activation is None else gate_and_mul(product, activation)


def _small_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: LinearConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    (num_rows, in_features), width = x.shape, weight.shape[0]
    out_width = width if activation is None else width // 2
    out = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert num_rows == 1, num_rows
    config = config or linear_config(width, in_features)
    if activation is not None and config.tile_rows == 1:
        config = replace(config, tile_rows=2)
    split_k = config.split_k
    num_tiles = ceil_div(width, config.tile_rows)
    assert split_k == 1 or num_tiles <= NUM_COUNTERS, num_tiles
    part_size = config.tile_rows if split_k > 1 else 0
    _small_linear_kernel[(num_tiles, split_k)](
        out,
        x,
        weight,
        bias,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device),
        WIDTH=width,
        IN_FEATURES=in_features,
        TILE_ROWS=config.tile_rows,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        ACTIVATION=activation,
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
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    ACTIVATION: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies some rows of the weight with x."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    rows = weight + row.to(tl.int64) * IN_FEATURES
    product = multiply_vector(x, rows, begin, end, IN_FEATURES, BLOCK_K, OVERLAP)
    if bias is not None:
        product += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if SPLIT_K == 1:
        _store_features(out, tile, product, WIDTH, ACTIVATION)
    else:
        place = parts + tile * SPLIT_K * TILE_ROWS + r[:, None]
        tl.store(place + split * TILE_ROWS, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros(product.shape, dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(place + i * TILE_ROWS, cache_modifier=".cg")
            _store_features(out, tile, product, WIDTH, ACTIVATION)


@jit
def _store_features(out: Pointer, tile: Scalar, product: Scalar, WIDTH: constexpr, ACTIVATION: constexpr) -> None:
    """[rows of the weight, 1], rounded."""
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = (tile * rounded.shape[0] + tl.arange(0, rounded.shape[0]))[:, None]
    tl.store(out + feature, rounded, mask=feature < out_width)


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
