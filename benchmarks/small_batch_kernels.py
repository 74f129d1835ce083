"""Candidates for decode steps of 2 to 16 rows, timed by `benchmarks.small_batches`. The server does not use them.

- `chained_linear`: `few_linear` that adds to the residual stream, leaves sums of squares, and normalizes what it reads:
  no launch for the norm between two products.
- `pair_linear` (a module of its own): multiply-adds for 2 to 4 rows, as `small_linear` does for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.arrival import arrival_counters, arrives_last
from legato.kernels.few_linear import FewConfig, _load_block, few_config
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit,
    jit_for_any,
    next_power_of_two,
    padded,
    tl,
)
from legato.kernels.overlap import launch_options, wait_for_previous


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream behind a product: [m, hidden], and what its squares sum to in each tile of the product."""

    total: Tensor
    squares: Tensor  # [tiles, rows of x, padded] float32


@jit
def request_lines(pointers: Pointer) -> None:
    """Ask for the lines at these addresses to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def chained_linear(
    x: Tensor | Stream,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,  # of a stream: weight and eps
    residual: Tensor | None = None,  # added to and overwritten; the result is a stream
    activation: Activation | None = None,
    config: FewConfig | None = None,
    prefetch: int = 0,  # columns behind the first block, requested before the wait
) -> Tensor | Stream:
    numbers = x.total if isinstance(x, Stream) else x
    assert isinstance(x, Stream) == (norm is not None)
    (num_rows, in_features), width = numbers.shape, weight.shape[0]
    config = config or few_config(num_rows, width, in_features)
    rows = next_power_of_two(num_rows, 8)
    num_tiles, split_k = ceil_div(width, config.tile_rows), config.split_k
    out_width = width if activation is None else width // 2
    if residual is None:
        out, squares = torch.empty(num_rows, out_width, dtype=numbers.dtype, device=numbers.device), None
    else:
        out = residual
        squares = torch.empty(num_tiles, rows, dtype=torch.float32, device=numbers.device)
    part_size = config.tile_rows * rows if split_k > 1 else 0
    _chained_kernel[(num_tiles, split_k)](
        out,
        numbers,
        weight,
        norm[0] if norm is not None else None,
        x.squares if isinstance(x, Stream) else None,
        squares,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=numbers.device),
        arrival_counters(numbers.device),
        norm[1] if norm is not None else 0.0,
        numbers.stride(0),
        num_rows,
        ROWS=rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        TILE_ROWS=config.tile_rows,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        NUM_SQUARES=x.squares.shape[0] if isinstance(x, Stream) else 0,
        ADD=residual is not None,
        ACTIVATION=activation,
        PREFETCH=prefetch,
        num_warps=config.num_warps,
        **launch_options(numbers),
    )
    return out if squares is None else Stream(out, squares)


@jit_for_any("num_rows")
def _chained_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    norm_weight: Pointer,
    squares: Pointer,
    new_squares: Pointer,
    parts: Pointer,
    counters: Pointer,
    eps: float,
    x_stride: Scalar,
    num_rows: Scalar,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    NUM_SQUARES: constexpr,
    ADD: constexpr,
    ACTIVATION: constexpr,
    PREFETCH: constexpr,
    OVERLAP: constexpr,
) -> None:
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    rows = weight + row.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    x_rows = x + (tl.minimum(m, num_rows - 1) * x_stride)[None, :] + k[:, None]
    product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
    weights = _load_block(rows, k[None, :], begin, end, IN_FEATURES, BLOCK_K, "evict_first")
    if PREFETCH > 0:
        line = tl.arange(0, PREFETCH // 64)
        behind = weight + row.to(tl.int64)[:, None] * IN_FEATURES + begin + BLOCK_K + line[None, :] * 64
        request_lines(behind)
    scale = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    rms = tl.zeros((1, ROWS), dtype=tl.float32)
    if NUM_SQUARES > 0:
        scale = tl.load(norm_weight + begin + k).to(tl.float32)[:, None]
    wait_for_previous(OVERLAP)
    if NUM_SQUARES > 0:
        t = tl.arange(0, padded(NUM_SQUARES, 1))
        sums = tl.load(squares + t[:, None] * ROWS + m[None, :], mask=(t < NUM_SQUARES)[:, None], other=0.0)
        rms = tl.rsqrt(tl.sum(sums, axis=0) / IN_FEATURES + eps)[None, :]
    values = _load_block(x_rows, k[:, None], begin, end, IN_FEATURES, BLOCK_K, "evict_last")
    for start in tl.range(begin, end, BLOCK_K, num_stages=1):
        next_values = _load_block(x_rows, k[:, None], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_last")
        next_weights = _load_block(rows, k[None, :], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_first")
        if NUM_SQUARES > 0:
            values = (values.to(tl.float32) * rms * scale).to(weights.dtype)
            column = tl.minimum(start + BLOCK_K, IN_FEATURES - BLOCK_K) + k
            scale = tl.load(norm_weight + column).to(tl.float32)[:, None]
        product = tl.dot(weights, values, product, input_precision="ieee")
        weights = next_weights
        values = next_values
    if SPLIT_K == 1:
        _store(out, new_squares, tile, product, num_rows, WIDTH, ACTIVATION, ADD)
    else:
        place = r[:, None] * ROWS + m[None, :]
        size: tl.constexpr = TILE_ROWS * ROWS
        tl.store(parts + (tile * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (tile * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _store(out, new_squares, tile, product, num_rows, WIDTH, ACTIVATION, ADD)


@jit
def _store(
    out: Pointer,
    squares: Pointer,
    tile: Scalar,
    product: Scalar,
    num_rows: Scalar,
    WIDTH: constexpr,
    ACTIVATION: constexpr,
    ADD: constexpr,
) -> None:
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = tile * rounded.shape[0] + tl.arange(0, rounded.shape[0])[:, None]
    m = tl.arange(0, rounded.shape[1])
    mask = (feature < out_width) & (m < num_rows)[None, :]
    pointers = out + m[None, :] * out_width + feature
    if ADD:
        wide = rounded.to(tl.float32) + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(out.dtype.element_ty)
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(squares + tile * rounded.shape[1] + m, tl.sum(wide * wide, axis=0))
    tl.store(pointers, rounded, mask=mask)
