"""Rotary position embedding of queries and keys, and the store of keys and values into the cache, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.kv_format import KVScales, cut_off, largest, store
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit,
    jit_for_any,
    kernel_or_torch,
    next_power_of_two,
    tl,
    widened,
)
from legato.kernels.overlap import launch_options, wait_for_previous

# Heads per program: 8 heads of 128 are 2 KB of bf16, two 16-byte loads for each thread of two warps.
HEADS_PER_PROGRAM = 8


def rotary_and_store(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], the packed projection
    positions: Tensor,  # [T] int32 or int64
    cos_sin_cache: Tensor | None,  # [max_positions, rotary_dim]: cosines, then sines; None stores without turning
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor,
    slot_mapping: Tensor,  # [T] int32 or int64, block * block_size + offset; negative: not stored
    scales: KVScales | None = None,  # of what is stored; what is turned in place has none
) -> None:
    """Turn queries and keys in place, halves against halves (GPT-NeoX), and write keys and values to their slots.

    A `rotary_dim` below `head_dim` leaves the last dimensions of a head as they are. Products are rounded before they
    are added, because transformers does so: in bfloat16 one token in fifty would differ otherwise.
    """
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    assert qkv.stride(1) == 1 and width % head_dim == 0 and width > 2 * num_kv_heads * head_dim, (
        qkv.shape,
        k_cache.shape,
    )
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous(), k_cache.stride()
    assert positions.shape == slot_mapping.shape == (num_tokens,), (positions.shape, slot_mapping.shape)
    assert positions.stride(0) == slot_mapping.stride(0) == 1, (positions.stride(), slot_mapping.stride())
    if cos_sin_cache is not None:
        assert cos_sin_cache.is_contiguous() and cos_sin_cache.shape[1] <= head_dim, cos_sin_cache.shape
        assert cos_sin_cache.shape[1] % 2 == 0, cos_sin_cache.shape
    run = kernel_or_torch(qkv, _rotary_and_store_triton, _rotary_and_store_torch)
    run(qkv, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, scales)


def _rotary_and_store_torch(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales | None = None,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if cos_sin_cache is not None:
        half = cos_sin_cache.shape[1] // 2
        cos, sin = widened(cos_sin_cache[positions])[:, None].split(half, dim=-1)
        turned = heads[:, : num_heads + num_kv_heads, : 2 * half]
        low, high = widened(turned).split(half, dim=-1)
        products = (product.to(qkv.dtype) for product in (low * cos, high * sin, high * cos, low * sin))
        low_cos, high_sin, high_cos, low_sin = map(widened, products)
        turned.copy_(torch.cat((low_cos - high_sin, high_cos + low_sin), dim=-1))
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    keys, values = heads[stored, num_heads : num_heads + num_kv_heads], heads[stored, num_heads + num_kv_heads :]
    store(k_cache.flatten(0, 1), slots, keys, None if scales is None else scales.keys)
    store(v_cache.flatten(0, 1), slots, values, None if scales is None else scales.values)


def _rotary_and_store_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales | None = None,
) -> None:
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    rotary_dim = 0 if cos_sin_cache is None else cos_sin_cache.shape[1]
    if num_tokens == 0:
        return
    num_programs = ceil_div(num_heads, HEADS_PER_PROGRAM) + ceil_div(num_kv_heads, HEADS_PER_PROGRAM)
    _rotary_and_store_kernel[(num_tokens, num_programs)](
        qkv,
        positions,
        # Without a table nothing is read through this pointer.
        qkv if cos_sin_cache is None else cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        None if scales is None else 1 / scales.keys,
        None if scales is None else 1 / scales.values,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_HALF=next_power_of_two(max(rotary_dim // 2, 1)),
        BLOCK_REST=next_power_of_two(max(head_dim - rotary_dim, 1)),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        LIMIT=largest(k_cache.dtype),
        num_warps=2,
        enable_fp_fusion=False,  # or the compiler makes one operation of a product, its rounding and the sum
        **launch_options(qkv),
    )


@jit_for_any("positions", "slot_mapping")
def _rotary_and_store_kernel(
    qkv: Pointer,
    positions: Pointer,
    cos_sin_cache: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    slot_mapping: Pointer,
    k_inverse: Scalar,
    v_inverse: Scalar,
    qkv_stride: Scalar,
    NUM_HEADS: constexpr,
    NUM_KV_HEADS: constexpr,
    HEAD_DIM: constexpr,
    ROTARY_DIM: constexpr,
    BLOCK_HALF: constexpr,
    BLOCK_REST: constexpr,
    BLOCK_HEADS: constexpr,
    LIMIT: constexpr,
    OVERLAP: constexpr,
) -> None:
    """The first programs of a token turn its queries; the others turn and store its keys and store its values."""
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_query_groups = tl.cdiv(NUM_HEADS, BLOCK_HEADS)
    row = qkv + token * qkv_stride
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    angles = cos_sin_cache + position * ROTARY_DIM
    if group < num_query_groups:
        head = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        if ROTARY_DIM > 0:
            _turn(row, head, head < NUM_HEADS, angles, row, False, None, HEAD_DIM, ROTARY_DIM, BLOCK_HALF, 0.0)
    else:
        head = (group - num_query_groups) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = head < NUM_KV_HEADS
        stored = inside & (slot >= 0)
        keys = row + NUM_HEADS * HEAD_DIM
        values = keys + NUM_KV_HEADS * HEAD_DIM
        cached_keys = k_cache + slot * (NUM_KV_HEADS * HEAD_DIM)
        cached_values = v_cache + slot * (NUM_KV_HEADS * HEAD_DIM)
        if ROTARY_DIM > 0:
            _turn(
                keys, head, inside, angles, cached_keys, slot >= 0, k_inverse, HEAD_DIM, ROTARY_DIM, BLOCK_HALF, LIMIT
            )
            _copy(values, cached_values, head, stored, v_inverse, 0, ROTARY_DIM, HEAD_DIM, 2 * BLOCK_HALF, LIMIT)
        if ROTARY_DIM < HEAD_DIM:
            _copy(keys, cached_keys, head, stored, k_inverse, ROTARY_DIM, HEAD_DIM, HEAD_DIM, BLOCK_REST, LIMIT)
            _copy(values, cached_values, head, stored, v_inverse, ROTARY_DIM, HEAD_DIM, HEAD_DIM, BLOCK_REST, LIMIT)


@jit
def _turn(
    heads: Pointer,
    head: Scalar,
    inside: Scalar,
    angles: Pointer,
    cached: Pointer,
    stored: Scalar,
    inverse: Scalar,
    HEAD_DIM: constexpr,
    ROTARY_DIM: constexpr,
    BLOCK_HALF: constexpr,
    LIMIT: constexpr,
) -> None:
    """Rotate some heads in place and, where `stored`, write the result to `cached` as well."""
    half: tl.constexpr = ROTARY_DIM // 2
    column = tl.arange(0, BLOCK_HALF)
    cos = tl.load(angles + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    offset = head[:, None] * HEAD_DIM + column[None, :]
    mask = inside[:, None] & (column < half)[None, :]
    low = tl.load(heads + offset, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + offset + half, mask=mask, other=0.0).to(tl.float32)
    turned_low = _rounded_sum(low * cos, -high * sin, heads.dtype.element_ty)
    turned_high = _rounded_sum(high * cos, low * sin, heads.dtype.element_ty)
    tl.store(heads + offset, turned_low, mask=mask)
    tl.store(heads + offset + half, turned_high, mask=mask)
    tl.store(cached + offset, cut_off(turned_low, inverse, LIMIT), mask=mask & stored)
    tl.store(cached + offset + half, cut_off(turned_high, inverse, LIMIT), mask=mask & stored)


@jit
def _rounded_sum(a: Scalar, b: Scalar, DTYPE: constexpr) -> Scalar:
    return (a.to(DTYPE).to(tl.float32) + b.to(DTYPE).to(tl.float32)).to(DTYPE)


@jit
def _copy(
    heads: Pointer,
    cached: Pointer,
    head: Scalar,
    mask: Scalar,
    inverse: Scalar,
    FIRST: constexpr,
    LAST: constexpr,
    HEAD_DIM: constexpr,
    BLOCK: constexpr,
    LIMIT: constexpr,
) -> None:
    """Columns [FIRST, LAST) of some heads, not turned."""
    column = FIRST + tl.arange(0, BLOCK)
    offset = head[:, None] * HEAD_DIM + column[None, :]
    inside = mask[:, None] & (column < LAST)[None, :]
    tl.store(cached + offset, cut_off(tl.load(heads + offset, mask=inside), inverse, LIMIT), mask=inside)
