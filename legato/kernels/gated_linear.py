"""Gate and up projections of steps with prefill on Hopper GPUs, fused with the activation.

A program stays on its multiprocessor and computes one tile after the other: 128 rows, and 128 columns of gate and the
same of up, which meet in the registers of one thread. One warp asks the copy unit for blocks of both matrices, some
stages ahead and beyond the end of a tile; two groups of four warps multiply 64 rows each. Results leave through shared
memory and the copy unit while the next tile is computed. What cuBLAS writes and the activation reads again, 57 KB for a
token and layer of an 8B model, never leaves the registers.

Written in Gluon, as `attention/hopper.py`: tests compile it everywhere and run it where there is such a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.activation import Activation
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
from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, is_available
from legato.kernels.overlap import launch_options

ROWS, COLUMNS, BLOCK_K = 128, 128, 64
# Tiles of rows that go over all columns together: their rows of x stay in the second-level cache.
GROUP = 16
STAGES = 4
# Below, and where the last round of tiles leaves many multiprocessors idle, cuBLAS has other tiles.
FEWEST_ROWS, LEAST_FILLED = 1024, 0.94


def suits(x: Tensor, weight: Tensor, activation: Activation) -> bool:
    """Whether the kernel can do it and is faster than cuBLAS and the activation one after the other.

    On an H200 that runs at its power limit, 4,096 inputs and 14,336 outputs: 1,024 / 1,152 / 1,536 / 2,048 / 4,096 /
    8,192 rows take 368 / 418 / 557 / 727 / 1,478 / 2,856 µs instead of 385 / 430 / 566 / 767 / 1,537 / 2,920.
    """
    (num_rows, in_features), inner = x.shape, weight.shape[0] // 2
    if num_rows < FEWEST_ROWS or activation != "silu" or x.dtype.itemsize != 2 or not is_available(gated_linear, x):
        return False
    limits = limits_of(x)
    if gl is None or limits.sm != 90 or in_features % BLOCK_K or inner % COLUMNS or not x.is_contiguous():
        return False
    num_tiles = ceil_div(num_rows, ROWS) * (inner // COLUMNS)
    rounds = ceil_div(num_tiles, limits.num_multiprocessors)
    return num_rows * inner >= LEAST_FILLED * rounds * limits.num_multiprocessors * ROWS * COLUMNS


def gated_linear(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """x [T, in], weight [2 inner, in] → [T, inner], as `gate_and_mul` of the product; for whatever `suits`."""
    (num_rows, in_features), inner = x.shape, weight.shape[0] // 2
    out = torch.empty(num_rows, inner, dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    num_tiles = ceil_div(num_rows, ROWS) * (inner // COLUMNS)
    _gated_linear_kernel[(min(limits_of(x).num_multiprocessors, num_tiles),)](
        TensorDescriptor.from_tensor(out, [64, 64], layout),
        TensorDescriptor.from_tensor(x, [ROWS, BLOCK_K], layout),
        TensorDescriptor.from_tensor(weight, [COLUMNS, BLOCK_K], layout),
        num_rows,
        INNER=inner,
        IN_FEATURES=in_features,
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=4,
        **launch_options(x),
    )
    return out


@gluon_jit("num_rows")
def _gated_linear_kernel(
    results: Pointer,
    rows: Pointer,
    columns: Pointer,
    num_rows: Scalar,
    INNER: constexpr,
    IN_FEATURES: constexpr,
    GROUP: constexpr,
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
                         0, INNER, IN_FEATURES, GROUP, STAGES)),
            (_multiply, (results, a_tiles, b_tiles, out_tiles, ready, free, num_rows,
                         1, INNER, IN_FEATURES, GROUP, STAGES)),
            (_fetch, (rows, columns, a_tiles, b_tiles, ready, free, num_rows,
                      INNER, IN_FEATURES, GROUP, STAGES)),
        ],
        [4, 1],  # warps of the second group and of the one that fetches
        [232, 40],  # their registers
    )
    # fmt: on


@gluon_jit()
def _place(tile: Scalar, num_tiles_m: Scalar, NUM_TILES_N: constexpr, GROUP: constexpr) -> Scalar:
    """Tiles of some rows go over all columns before the next rows have their turn."""
    group_size = GROUP * NUM_TILES_N
    first = tile // group_size * GROUP
    size = gl.minimum(num_tiles_m - first, GROUP)
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
    INNER: constexpr,
    IN_FEATURES: constexpr,
    GROUP: constexpr,
    STAGES: constexpr,
) -> None:
    num_tiles_n: gl.constexpr = INNER // 128
    num_tiles_m = (num_rows + 127) // 128
    step = 0
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        m, n = _place(tile, num_tiles_m, num_tiles_n, GROUP)
        for k in range(0, IN_FEATURES, 64):
            stage = step % STAGES
            # The first round waits for the phase before the first, which counts as over.
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (128 + 256) * 64 * 2)
            b_tile = b_tiles.index(stage)
            tma.async_copy_global_to_shared(rows, [m * 128, k], ready.index(stage), a_tiles.index(stage))
            tma.async_copy_global_to_shared(columns, [n * 128, k], ready.index(stage), b_tile.slice(0, 128, dim=0))
            tma.async_copy_global_to_shared(
                columns, [INNER + n * 128, k], ready.index(stage), b_tile.slice(128, 128, dim=0)
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
    INNER: constexpr,
    IN_FEATURES: constexpr,
    GROUP: constexpr,
    STAGES: constexpr,
) -> None:
    """64 rows of every tile."""
    num_tiles_n: gl.constexpr = INNER // 128
    num_steps: gl.constexpr = IN_FEATURES // 64
    dtype: gl.constexpr = a_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    num_tiles_m = (num_rows + 127) // 128
    step = 0
    product = gl.zeros([64, 256], gl.float32, layout)
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        m, n = _place(tile, num_tiles_m, num_tiles_n, GROUP)
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
        # The roundings of a product and of `gate_and_mul` behind it.
        gate, up = product.to(dtype).reshape([64, 2, 128]).permute((0, 2, 1)).split()
        gate = gate.to(gl.float32)
        gate = (gate / (1.0 + gl.exp2(gate * -1.4426950408889634))).to(dtype).to(gl.float32)
        gated = (gate * up.to(gl.float32)).to(dtype)
        _store_halves(results, out_tiles, gated, m * 128 + WARP_GROUP * 64, n * 128, WARP_GROUP)
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
