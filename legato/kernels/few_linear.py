"""A linear layer for 2 to 16 rows on the matrix units; weights are prefetched before the rows are ready.

Reading the weights is all the cost, as for one row (`small_linear`), but every weight meets several rows. So a program
takes more rows of the weight than there, or reading the rows of x again and again would take as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, jit_for_any, next_power_of_two, tl
from legato.kernels.overlap import launch_options, wait_for_previous

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class FewConfig:
    tile_rows: int  # rows of the weight per program
    block_k: int
    num_warps: int
    split_k: int = 1


def few_config(num_rows: int, out_features: int, in_features: int) -> FewConfig:
    """Of sweeps on an H200 over the products of an 8B model. Long matrices of few rows are split along their columns,
    so that there are twelve warps for each multiprocessor."""
    tile_rows, num_warps = (32, 2) if num_rows <= 8 else (64, 4)
    num_warps_in_all = ceil_div(out_features, tile_rows) * num_warps
    split_k = 1
    while split_k < 8 and num_warps_in_all * split_k < 1536 and in_features >= 1024 * split_k:
        split_k *= 2
    return FewConfig(tile_rows, 128, num_warps, split_k)


def few_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: FewConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """x [m, in_features], weight [out_features, in_features] → [m, out_features], on a GPU. Defined by
    `small_linear`, which calls it. With an activation [m, out_features / 2], as `gate_and_mul` would make of that."""
    (num_rows, in_features), width = x.shape, weight.shape[0]
    assert num_rows <= MAX_ROWS, num_rows
    config = config or few_config(num_rows, width, in_features)
    rows = next_power_of_two(num_rows, 8)
    num_tiles, split_k = ceil_div(width, config.tile_rows), config.split_k
    assert split_k == 1 or num_tiles <= NUM_COUNTERS, num_tiles
    out_width = width if activation is None else width // 2
    out = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    part_size = config.tile_rows * rows if split_k > 1 else 0
    _few_kernel[(num_tiles, split_k)](
        out,
        x,
        weight,
        bias,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=x.device),
        arrival_counters(x.device),
        x.stride(0),
        num_rows,
        ROWS=rows,
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


# The sizes of the weight are constants: as arguments they cost all that is gained over cuBLAS.
@jit_for_any("num_rows")
def _few_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    parts: Pointer,
    counters: Pointer,
    x_stride: Scalar,
    num_rows: Scalar,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    ACTIVATION: constexpr,
    OVERLAP: constexpr,
) -> None:
    """The weight is the left, larger operand, so that few rows of x waste little."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    # Beyond the last feature and the last row of x the last ones are read again, which spares the loads a mask.
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    rows = weight + row.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    x_rows = x + (tl.minimum(m, num_rows - 1) * x_stride)[None, :] + k[:, None]
    product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
    weights = _load_block(rows, k[None, :], begin, end, IN_FEATURES, BLOCK_K, "evict_first")
    wait_for_previous(OVERLAP)
    values = _load_block(x_rows, k[:, None], begin, end, IN_FEATURES, BLOCK_K, "evict_last")
    # Blocks wait in registers for their turn: the compiler's own stages would begin behind the wait.
    for start in tl.range(begin, end, BLOCK_K, num_stages=1):
        next_values = _load_block(x_rows, k[:, None], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_last")
        next_weights = _load_block(rows, k[None, :], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_first")
        product = tl.dot(weights, values, product, input_precision="ieee")
        weights = next_weights
        values = next_values
    if bias is not None:
        product += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    if SPLIT_K == 1:
        _store_transposed(out, tile, product, num_rows, WIDTH, ACTIVATION)
    else:
        place = r[:, None] * ROWS + m[None, :]
        size: tl.constexpr = TILE_ROWS * ROWS
        tl.store(parts + (tile * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (tile * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _store_transposed(out, tile, product, num_rows, WIDTH, ACTIVATION)


@jit
def _load_block(
    pointers: Pointer,
    column: Scalar,
    start: Scalar,
    end: Scalar,
    IN_FEATURES: constexpr,
    BLOCK_K: constexpr,
    POLICY: constexpr,
) -> Scalar:
    """Columns from `start` on; zeros behind `end`."""
    inside = start < end
    if IN_FEATURES % BLOCK_K != 0:
        inside = inside & (start + column < IN_FEATURES)
    return tl.load(pointers + start, mask=inside, other=0.0, eviction_policy=POLICY)


@jit
def _store_transposed(
    out: Pointer, tile: Scalar, product: Scalar, num_rows: Scalar, WIDTH: constexpr, ACTIVATION: constexpr
) -> None:
    """[rows of the weight, rows of x], rounded."""
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = tile * rounded.shape[0] + tl.arange(0, rounded.shape[0])[:, None]
    m = tl.arange(0, rounded.shape[1])[None, :]
    tl.store(out + m * out_width + feature, rounded, mask=(feature < out_width) & (m < num_rows))
