"""Rotary position embedding of the patches of an image, in one launch.

Vision towers rotate in float32 and round once, where language models round every product (`kernels/rotary.py`). In
torch that is a dozen passes over queries and keys, in each of a tower's layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, kernel_or_torch, next_power_of_two, tl
from legato.kernels.overlap import launch_options, wait_for_previous

HEADS_PER_PROGRAM = 8


def rotate_patches(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [N, num_heads, head_dim] in place, halves against halves, by angles with these cosines and sines
    [N, head_dim / 2] float32."""
    num_patches, _, head_dim = heads.shape
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim and head_dim % 2 == 0, heads.stride()
    assert cos.shape == sin.shape == (num_patches, head_dim // 2), (cos.shape, sin.shape)
    assert cos.is_contiguous() and sin.is_contiguous()
    kernel_or_torch(heads, _rotate_patches_triton, _rotate_patches_torch)(heads, cos, sin)


def _rotate_patches_torch(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    cos, sin = cos[:, None], sin[:, None]
    low, high = heads.float().chunk(2, dim=-1)
    heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


def _rotate_patches_triton(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_patches, num_heads, head_dim = heads.shape
    if num_patches == 0:
        return
    _rotate_patches_kernel[(num_patches, ceil_div(num_heads, HEADS_PER_PROGRAM))](
        heads,
        cos,
        sin,
        heads.stride(0),
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=next_power_of_two(head_dim // 2),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
        **launch_options(heads),
    )


@jit
def _rotate_patches_kernel(
    heads: Pointer,
    cosines: Pointer,
    sines: Pointer,
    stride: Scalar,
    NUM_HEADS: constexpr,
    HALF: constexpr,
    BLOCK_HALF: constexpr,
    BLOCK_HEADS: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program rotates some heads of one patch."""
    wait_for_previous(OVERLAP)
    patch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cosines + patch * HALF + column, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(sines + patch * HALF + column, mask=column < HALF, other=0.0)[None, :]
    place = heads + patch * stride + head[:, None] * (2 * HALF) + column[None, :]
    mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (low * cos - high * sin).to(heads.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (high * cos + low * sin).to(heads.dtype.element_ty), mask=mask)
