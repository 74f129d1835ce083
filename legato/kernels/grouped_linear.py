"""A grouped linear layer, whose rows use different matrices: MoE experts.

Rows are put into the order of their experts, and a tile of the product has rows of one expert only. How many rows an
expert has is known on the device alone, so the grid is the most tiles there can be and every tile finds its expert
itself: nothing waits for the host, and a CUDA graph can replay it. Experts without rows are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, kernel_or_torch, padded, tl, widened
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.small_linear import multiply_vector

# Rows that a program of the grouping looks at in one go.
GROUPING_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by expert. Row t * k + i is what token t sends to the i-th of its k experts, which all differ."""

    ids: Tensor  # [T, k] int64, the experts
    order: Tensor  # [T k] int32, the rows of expert 0, those of expert 1, …, each in rising order
    starts: Tensor  # [num_experts + 1] int32: expert e has order[starts[e] : starts[e + 1]]

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0] - 1


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    block_m: int  # rows of x per program; 1: no matrix units, for a single token
    block_n: int  # rows of the weight per program
    block_k: int
    num_warps: int
    num_stages: int  # blocks in flight in shared memory, for the matrix units


def grouped_config(num_tokens: int, num_rows: int, num_experts: int, itemsize: int) -> GroupedConfig:
    """By the rows that an expert has on average: what is read by few rows should be read once, and fast.

    The best of a few on an H200 with Mixtral 8x7B's shapes in bf16: 4.0 to 4.5 TB/s for up to 64 tokens, 234 TFLOP/s
    for 256, 550 to 600 for 4,096.
    """
    if num_tokens == 1:
        return GroupedConfig(block_m=1, block_n=4, block_k=1024, num_warps=4, num_stages=1)
    mean = num_rows / num_experts
    if mean <= 8:
        return GroupedConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=5)
    if mean <= 32:
        return GroupedConfig(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if mean <= 96 or itemsize > 2:  # the largest tiles fit the shared memory in 16 bits only
        return GroupedConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)
    return GroupedConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3)


def group_rows(ids: Tensor, num_experts: int) -> Groups:
    """ids [T, k] int64."""
    assert ids.dim() == 2 and ids.is_contiguous() and ids.dtype == torch.int64, (ids.shape, ids.dtype)
    return kernel_or_torch(ids, _group_rows_triton, _group_rows_torch)(ids, num_experts)


def grouped_linear(
    x: Tensor,  # [T k, in_features], or [T, in_features] where the k rows of a token are the same
    weight: Tensor,  # [num_experts, out_features, in_features]
    groups: Groups,
    scale: Tensor | None = None,  # [T k], multiplies the rows of the result
    config: GroupedConfig | None = None,
) -> Tensor:
    """Row r of the result [T k, out_features] is the product of its row of x with the matrix of its expert."""
    assert x.dim() == 2 and x.shape[0] in (groups.ids.shape[0], groups.ids.numel()), (x.shape, groups.ids.shape)
    assert weight.shape[0] == groups.num_experts and weight.shape[2] == x.shape[1], (weight.shape, x.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype, (x.stride(), weight.stride())
    assert scale is None or (scale.numel() == groups.ids.numel() and scale.is_contiguous()), scale.shape
    run = kernel_or_torch(x, _grouped_linear_triton, _grouped_linear_torch)
    return run(x, weight, groups, scale, config)


def _group_rows_torch(ids: Tensor, num_experts: int) -> Groups:
    in_order, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=ids.device), out_int32=True)
    return Groups(ids, order.int(), starts)


def _grouped_linear_torch(
    x: Tensor, weight: Tensor, groups: Groups, scale: Tensor | None, config: GroupedConfig | None = None
) -> Tensor:
    """One product for each expert that has rows, in fp32. `config` has no say here.

    torch's own grouped product is the same loop on a CPU, and refuses rows that are no multiple of 16 bytes.
    """
    out = torch.empty(groups.ids.numel(), weight.shape[1], dtype=widened(x[:0]).dtype, device=x.device)
    share = groups.ids.numel() // max(x.shape[0], 1)
    for expert, (first, last) in enumerate(pairwise(groups.starts.tolist())):
        if first < last:
            rows = groups.order[first:last]
            out[rows] = F.linear(widened(x[rows // share]), widened(weight[expert]))
    return (out if scale is None else out * scale.view(-1, 1)).to(x.dtype)


def _group_rows_triton(ids: Tensor, num_experts: int) -> Groups:
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    # One program more than there are experts: all rows come before its.
    _group_rows_kernel[(num_experts + 1,)](
        order, starts, ids, ids.numel(), BLOCK=GROUPING_BLOCK, num_warps=4, **launch_options(ids)
    )
    return Groups(ids, order, starts)


def _grouped_linear_triton(
    x: Tensor, weight: Tensor, groups: Groups, scale: Tensor | None, config: GroupedConfig | None = None
) -> Tensor:
    num_tokens, num_rows = groups.ids.shape[0], groups.ids.numel()
    num_experts, out_features, in_features = weight.shape
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    config = config or grouped_config(num_tokens, num_rows, num_experts, x.element_size())
    assert config.block_m > 1 or num_tokens == 1, "without matrix units every row needs an expert of its own"
    constants = dict(
        SHARE=num_rows // x.shape[0],
        WIDTH=out_features,
        IN_FEATURES=in_features,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        **launch_options(x),
    )
    width = ceil_div(out_features, config.block_n)
    if config.block_m == 1:
        grid = (width, num_rows)
        _single_token_kernel[grid](out, x, weight, groups.ids, scale, x.stride(0), **constants)
        return out
    # The most tiles: every expert that can have a row has one, and all other rows fill tiles of their own.
    most_used = min(num_experts, num_rows)
    grid = (most_used + (num_rows - most_used) // config.block_m, width)
    _grouped_linear_kernel[grid](
        out,
        x,
        weight,
        groups.order,
        groups.starts,
        scale,
        x.stride(0),
        NUM_EXPERTS=num_experts,
        BLOCK_M=config.block_m,
        STAGES=config.num_stages,
        **constants,
    )
    return out


@jit
def _group_rows_kernel(
    order: Pointer, starts: Pointer, ids: Pointer, num_rows: Scalar, BLOCK: constexpr, OVERLAP: constexpr
) -> None:
    """A program counts the rows of all experts before its own, and puts its rows behind them."""
    wait_for_previous(OVERLAP)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_rows, BLOCK):
        row = first + place
        before += (tl.load(ids + row, mask=row < num_rows, other=expert) < expert).to(tl.int32)
    free = tl.sum(before, axis=0)
    tl.store(starts + expert, free)
    for first in range(0, num_rows, BLOCK):
        row = first + place
        ours = (tl.load(ids + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
        tl.store(order + free + tl.cumsum(ours, axis=0) - 1, row, mask=ours == 1)
        free += tl.sum(ours, axis=0)


@jit
def _single_token_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    ids: Pointer,
    scale: Pointer,
    x_stride: Scalar,
    SHARE: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies some rows of one expert's weight with the one row that goes to it."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(1)
    expert = tl.load(ids + row)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last feature the last is computed again, which spares the loads a mask.
    matrix = weight + (expert * WIDTH + tl.minimum(feature, WIDTH - 1)) * IN_FEATURES
    vector = x + row // SHARE * x_stride
    product = multiply_vector(vector, matrix, 0, IN_FEATURES, IN_FEATURES, BLOCK_K, False)
    if scale is not None:
        product *= tl.load(scale + row).to(tl.float32)
    pointers = out + row * WIDTH + feature[:, None]
    tl.store(pointers, product.to(out.dtype.element_ty), mask=(feature < WIDTH)[:, None])


@jit
def _grouped_linear_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    order: Pointer,
    starts: Pointer,
    scale: Pointer,
    x_stride: Scalar,
    NUM_EXPERTS: constexpr,
    SHARE: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    STAGES: constexpr,
    OVERLAP: constexpr,
) -> None:
    """The tiles of one part of the features stand side by side, so that those of an expert read its weight at once."""
    wait_for_previous(OVERLAP)
    expert, first, last = find_tile(starts, tl.program_id(0), NUM_EXPERTS, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    # Rows and features that are not there repeat the last, which spares the loads a mask; they are not stored.
    row = tl.load(order + tl.minimum(place, last - 1)).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = x + row // SHARE * x_stride
    matrix = weight + (expert.to(tl.int64) * WIDTH + tl.minimum(feature, WIDTH - 1)) * IN_FEATURES
    # The weight is the left operand: it is always large enough for the matrix units, however few rows there are.
    product = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, IN_FEATURES, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        if IN_FEATURES % BLOCK_K == 0:
            weights = tl.load(matrix[:, None] + column[None, :])
            values = tl.load(inputs[None, :] + column[:, None])
        else:
            inside = column < IN_FEATURES
            weights = tl.load(matrix[:, None] + column[None, :], mask=inside[None, :], other=0.0)
            values = tl.load(inputs[None, :] + column[:, None], mask=inside[:, None], other=0.0)
        product = tl.dot(weights, values, product, input_precision="ieee")
    if scale is not None:
        product *= tl.load(scale + row).to(tl.float32)[None, :]
    there = (feature < WIDTH)[:, None] & (place < last)[None, :]
    tl.store(out + row[None, :] * WIDTH + feature[:, None], product.to(out.dtype.element_ty), mask=there)


@jit
def find_tile(starts: Pointer, tile: Scalar, NUM_EXPERTS: constexpr, BLOCK_M: constexpr) -> Scalar:
    """The expert of a tile, its first place in the order, and where the expert's places end. Beyond the last tile the
    expert is none."""
    e = tl.arange(0, padded(NUM_EXPERTS))
    known = e < NUM_EXPERTS
    begin = tl.load(starts + e, mask=known, other=0)
    end = tl.load(starts + e + 1, mask=known, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    is_done = tl.cumsum(tiles, axis=0) <= tile  # all tiles of the expert come before this one
    expert = tl.sum(is_done.to(tl.int32), axis=0)
    index = tile - tl.sum(tl.where(is_done, tiles, 0), axis=0)
    is_ours = e == expert
    first = tl.sum(tl.where(is_ours, begin, 0), axis=0) + index * BLOCK_M
    return expert, first, tl.sum(tl.where(is_ours, end, 0), axis=0)
