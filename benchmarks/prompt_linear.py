"""A linear layer for steps with prompts on Hopper GPUs, with gate and activation behind it if wanted.

A program stays on its multiprocessor and computes one tile of 128 rows and 256 columns after the other. One warp asks
the copy unit for blocks of both matrices, some stages ahead and beyond the end of a tile; two groups of four warps
multiply 64 rows each. With an activation, a tile is 128 columns of gate and the same of up, which meet in the
registers of one thread. Results leave through shared memory and the copy unit while the next tile is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.device import limits_of
from legato.kernels.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr
from legato.kernels.overlap import launch_options

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64


@dataclass(frozen=True)
class PromptConfig:
    group_m: int = 8  # tiles of rows that share columns while they are in the cache
    stages: int = 4
    num_programs: int | None = None  # None: one for each multiprocessor


def prompt_linear(x: Tensor, weight: Tensor, gated: bool = False, config: PromptConfig | None = None) -> Tensor:
    """x [T, in], weight [out, in] → [T, out]; gated: [T, out / 2], silu of the first half times the second."""
    config = config or PromptConfig()
    (num_rows, in_features), width = x.shape, weight.shape[0]
    out_width = width // 2 if gated else width
    tile_width = BLOCK_N // 2 if gated else BLOCK_N
    assert in_features % BLOCK_K == 0 and out_width % tile_width == 0, (x.shape, weight.shape)
    out = torch.empty(num_rows, out_width, dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K], layout)
    columns = TensorDescriptor.from_tensor(weight, [BLOCK_N // 2, BLOCK_K], layout)
    results = TensorDescriptor.from_tensor(out, [64, 64], layout)
    num_tiles = ceil_div(num_rows, BLOCK_M) * (out_width // tile_width)
    num_programs = min(config.num_programs or limits_of(x).num_multiprocessors, num_tiles)
    _prompt_linear_kernel[(num_programs,)](
        results,
        rows,
        columns,
        num_rows,
        OUT_WIDTH=out_width,
        IN_FEATURES=in_features,
        GATED=gated,
        GROUP_M=config.group_m,
        STAGES=config.stages,
        num_warps=4,
        **launch_options(x),
    )
    return out


@gluon_jit("num_rows")
def _prompt_linear_kernel(
    results: Pointer,
    rows: Pointer,
    columns: Pointer,
    num_rows: Scalar,
    OUT_WIDTH: constexpr,
    IN_FEATURES: constexpr,
    GATED: constexpr,
    GROUP_M: constexpr,
    STAGES: constexpr,
    OVERLAP: constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    dtype: gl.constexpr = rows.dtype
    shared: gl.constexpr = rows.layout
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], shared)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], shared)
    out_tiles = gl.allocate_shared_memory(dtype, [4, 64, 64], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # by each of the groups
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (results, a_tiles, b_tiles, out_tiles, ready, free, num_rows,
                         0, OUT_WIDTH, IN_FEATURES, GATED, GROUP_M, STAGES)),
            (_multiply, (results, a_tiles, b_tiles, out_tiles, ready, free, num_rows,
                         1, OUT_WIDTH, IN_FEATURES, GATED, GROUP_M, STAGES)),
            (_fetch, (rows, columns, a_tiles, b_tiles, ready, free, num_rows,
                      OUT_WIDTH, IN_FEATURES, GATED, GROUP_M, STAGES)),
        ],
        [4, 1],  # warps of the second group and of the one that fetches
        [232, 40],  # their registers
    )
    # fmt: on


@gluon_jit()
def _place(tile: Scalar, num_tiles_m: Scalar, NUM_TILES_N: constexpr, GROUP_M: constexpr) -> Scalar:
    """Tiles of some rows go over all columns before the next rows have their turn."""
    group_size = GROUP_M * NUM_TILES_N
    first = tile // group_size * GROUP_M
    size = gl.minimum(num_tiles_m - first, GROUP_M)
    within = tile % group_size
    return first + within % size, within // size


@gluon_jit()
def _fetch(
    rows: Pointer,
    columns: Pointer,
    a_tiles: Pointer,
    b_tiles: Pointer,
    ready: Pointer,
    free: Pointer,
    num_rows: Scalar,
    OUT_WIDTH: constexpr,
    IN_FEATURES: constexpr,
    GATED: constexpr,
    GROUP_M: constexpr,
    STAGES: constexpr,
) -> None:
    tile_width: gl.constexpr = 128 if GATED else 256
    second: gl.constexpr = OUT_WIDTH if GATED else 128  # from the first 128 columns to the others
    num_tiles_n: gl.constexpr = OUT_WIDTH // tile_width
    num_tiles_m = (num_rows + 127) // 128
    step = 0
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        m, n = _place(tile, num_tiles_m, num_tiles_n, GROUP_M)
        for k in range(0, IN_FEATURES, 64):
            stage = step % STAGES
            # The first round waits for the phase before the first, which counts as over.
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (128 + 256) * 64 * 2)
            b_tile = b_tiles.index(stage)
            tma.async_copy_global_to_shared(rows, [m * 128, k], ready.index(stage), a_tiles.index(stage))
            tma.async_copy_global_to_shared(
                columns, [n * tile_width, k], ready.index(stage), b_tile.slice(0, 128, dim=0)
            )
            tma.async_copy_global_to_shared(
                columns, [n * tile_width + second, k], ready.index(stage), b_tile.slice(128, 128, dim=0)
            )
            step += 1


@gluon_jit()
def _multiply(
    results: Pointer,
    a_tiles: Pointer,
    b_tiles: Pointer,
    out_tiles: Pointer,
    ready: Pointer,
    free: Pointer,
    num_rows: Scalar,
    WARP_GROUP: constexpr,
    OUT_WIDTH: constexpr,
    IN_FEATURES: constexpr,
    GATED: constexpr,
    GROUP_M: constexpr,
    STAGES: constexpr,
) -> None:
    """64 rows of every tile."""
    tile_width: gl.constexpr = 128 if GATED else 256
    num_tiles_n: gl.constexpr = OUT_WIDTH // tile_width
    num_steps: gl.constexpr = IN_FEATURES // 64
    dtype: gl.constexpr = a_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_tiles_m = (num_rows + 127) // 128
    step = 0
    product = gl.zeros([64, 256], gl.float32, layout)
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        m, n = _place(tile, num_tiles_m, num_tiles_n, GROUP_M)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            a = a_tiles.index(stage).slice(WARP_GROUP * 64, 64, dim=0)
            product = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), product, use_acc=k > 0, is_async=True)
            # One product is under way while the next is asked for; the blocks of the one before are free.
            product = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        rounded = product.to(dtype)
        if GATED:
            gate, up = rounded.reshape([64, 2, 128]).permute((0, 2, 1)).split()
            gate = gate.to(gl.float32)
            gate = (gate / (1.0 + gl.exp2(gate * -1.4426950408889634))).to(dtype).to(gl.float32)
            gated = gate * up.to(gl.float32)
            _store_halves(results, out_tiles, gated.to(dtype), m * 128 + WARP_GROUP * 64, n * 128, WARP_GROUP)
        else:
            left, right = rounded.reshape([64, 2, 128]).permute((0, 2, 1)).split()
            _store_halves(results, out_tiles, left, m * 128 + WARP_GROUP * 64, n * 256, WARP_GROUP)
            _store_halves(results, out_tiles, right, m * 128 + WARP_GROUP * 64, n * 256 + 128, WARP_GROUP)
    tma.store_wait(0)


@gluon_jit()
def _store_halves(
    results: Pointer, out_tiles: Pointer, values: Scalar, row: Scalar, column: Scalar, WARP_GROUP: constexpr
) -> None:
    """[64, 128] through this group's two tiles of shared memory, each of 64 columns."""
    first, second = values.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    tma.store_wait(0)  # what was stored last has left shared memory
    left = out_tiles.index(WARP_GROUP * 2)
    right = out_tiles.index(WARP_GROUP * 2 + 1)
    left.store(first)
    right.store(second)
    fence_async_shared()
    tma.async_copy_shared_to_global(results, [row, column], left)
    tma.async_copy_shared_to_global(results, [row, column + 64], right)
