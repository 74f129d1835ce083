"""Decode attention of a few sequences that also rotates queries and keys and stores keys and values.

At a handful of rows a decode step waits for launches more than for memory. This kernel has its first keys and values on
their way before the projection is done: all but the newest were stored by earlier steps. The newest key and value never
come from the cache; they are where the sums begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.arrival import arrival_counters, arrives_last
from legato.kernels.attention.configs import DecodeConfig, decode_config
from legato.kernels.attention.decode import _merge, _store_part, _store_whole, decode_attention
from legato.kernels.attention.splits import choose_split_len, find_sequence, shortest_split_len, splits_before
from legato.kernels.language import (
    Pointer,
    Scalar,
    constexpr,
    is_available,
    jit,
    jit_for_any,
    kernel_or_torch,
    padded,
    tl,
)
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.paged_kv import PagedKV, Scoring, cache_offsets, find_table, lowest_scores
from legato.kernels.rotary import _rounded_sum, rotary_and_store

MAX_SEQUENCES = 16
HEAD_DIMS = (64, 128)


def suits(qkv: Tensor, cos_sin_cache: Tensor | None, kv: PagedKV, scoring: Scoring) -> bool:
    """Whether `turned_attention` computes this, and was measured to be faster. Milliseconds of a step of an 8B model on
    an H200 with 1 / 2 / 4 / 8 / 16 rows: 3.70 / 4.08 / 4.15 / 4.19 / 4.42 with two launches, 3.68 / 3.99 / 4.02 / 4.07
    / 4.25 with this one."""
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    is_plain = scoring.alibi_slopes is None and not scoring.window and not scoring.soft_cap and scoring.sinks is None
    if not is_plain or cos_sin_cache is None or qkv.shape[0] > MAX_SEQUENCES or not is_available(_turned_triton, qkv):
        return False
    fits = head_dim in HEAD_DIMS and cos_sin_cache.shape[1] == head_dim and qkv.shape[0] * num_kv_heads < 512
    return fits and qkv.dtype == kv.k_cache.dtype and qkv.dtype.itemsize == 2 and launch_options(qkv)["OVERLAP"]


def turned_attention(
    qkv: Tensor,  # [n, (num_heads + 2 * num_kv_heads) * head_dim], the packed projection; overwritten or not
    positions: Tensor,  # [n] int32 or int64
    cos_sin_cache: Tensor,  # [max_positions, head_dim]: cosines, then sines
    kv: PagedKV,  # whose contexts include the new tokens; none is empty
    slots: Tensor,  # [n], where the new keys and values go; negative: not stored
    scoring: Scoring,
) -> Tensor:
    """`rotary_and_store`, then `decode_attention`, whose result it returns as [n, num_heads * head_dim].

    Lengths, positions, tables, slots and the keys of earlier steps are read before the previous kernel is done, so no
    kernel behind the embedding may write them.
    """
    run = kernel_or_torch(qkv, _turned_triton, _turned_torch)
    return run(qkv, positions, cos_sin_cache, kv, slots, scoring)


def _turned_torch(
    qkv: Tensor, positions: Tensor, cos_sin_cache: Tensor, kv: PagedKV, slots: Tensor, scoring: Scoring
) -> Tensor:
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    rotary_and_store(qkv, positions, cos_sin_cache, kv.k_cache, kv.v_cache, slots)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return decode_attention(heads[:, : heads.shape[1] - 2 * num_kv_heads], kv, scoring).flatten(1)


def _turned_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv: PagedKV,
    slots: Tensor,
    scoring: Scoring,
    config: DecodeConfig | None = None,
) -> Tensor:
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    num_sequences, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    config = config or decode_config(num_sequences, num_kv_heads)
    out = torch.empty(num_sequences, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_sequences == 0:
        return out
    num_splits = num_sequences + config.extra_splits
    _turned_kernel[(num_kv_heads, num_splits)](
        out,
        qkv,
        positions,
        cos_sin_cache,
        kv.k_cache,
        kv.v_cache,
        kv.block_tables,
        kv.context_lens,
        kv.rows,
        slots,
        torch.empty(num_splits * num_heads, head_dim + 4, dtype=torch.float32, device=qkv.device),
        arrival_counters(qkv.device),
        num_sequences,
        qkv.stride(0),
        kv.block_tables.stride(0),
        config.extra_splits,
        config.min_split_len,
        **kv.constants(),
        SCALE=scoring.scale,
        GROUP=num_heads // num_kv_heads,
        BLOCK_N=config.block_n,
        SCAN=32 if num_sequences <= 32 else 128,
        SINGLE=num_sequences == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,  # as in `rotary_and_store`
        **launch_options(qkv),
    )
    return out


@jit_for_any("positions", "context_lens", "rows", "slots", "num_sequences", "extra_splits", "min_split_len")
def _turned_kernel(
    out: Pointer,
    qkv: Pointer,
    positions: Pointer,
    angles: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    block_tables: Pointer,
    context_lens: Pointer,
    rows: Pointer,
    slots: Pointer,
    parts: Pointer,
    counters: Pointer,
    num_sequences: Scalar,
    qkv_stride: Scalar,
    table_stride: Scalar,
    extra_splits: Scalar,
    min_split_len: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_N: constexpr,
    SCAN: constexpr,
    SINGLE: constexpr,
    SCALE: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
) -> None:
    """The grid is that of `decode_attention`."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = 0
    if SINGLE:
        sequence = 0
        split = tl.program_id(1)
        length = tl.load(context_lens)
        split_len = shortest_split_len(length, extra_splits, min_split_len, BLOCK_N)
        is_left_over = (split > 0) & (split * split_len >= length)
    else:
        split_len = choose_split_len(context_lens, num_sequences, extra_splits, min_split_len, BLOCK_N, 0, SCAN)
        if sequence >= num_sequences:
            place = sequence - num_sequences
            sequence, first_place = find_sequence(place, context_lens, num_sequences, split_len, 0, SCAN)
            split = 1 + place - first_place
        is_left_over = sequence >= num_sequences
    if is_left_over:
        return
    context_len = tl.load(context_lens + sequence)
    block_table = find_table(block_tables, rows, sequence, table_stride)
    begin = split * split_len
    end = tl.minimum(begin + split_len, context_len)
    last = context_len - 1
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    half: tl.constexpr = HEAD_DIM // 2
    other = (d + half) % HEAD_DIM
    column = (kv_head * HEAD_DIM + d)[None, :]
    old_end = tl.minimum(end, last)
    position = begin + n
    offsets = _offsets(block_table, position, old_end, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)
    is_old = (position < old_end)[:, None]
    keys = tl.load(k_cache + offsets + column, mask=is_old, other=0.0)
    values = tl.load(v_cache + offsets + column, mask=is_old, other=0.0)
    turn = angles + tl.load(positions + sequence).to(tl.int64) * HEAD_DIM + d % half
    cos = tl.load(turn).to(tl.float32)
    sin = tl.load(turn + half).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    slot = tl.load(slots + sequence).to(tl.int64)
    wait_for_previous(OVERLAP)
    row = qkv + sequence * qkv_stride
    h = tl.arange(0, padded(GROUP, 16))
    inside = (h < GROUP)[:, None]
    heads = row + (kv_head * GROUP + h)[:, None] * HEAD_DIM
    query = tl.load(heads + d[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(heads + other[None, :], mask=inside, other=0.0).to(tl.float32)
    query = _rounded_sum(query * cos[None, :], partner * sin[None, :], qkv.dtype.element_ty)
    new_key = row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
    key = tl.load(new_key + d).to(tl.float32)
    key_partner = tl.load(new_key + other).to(tl.float32)
    key = _rounded_sum(key * cos, key_partner * sin, qkv.dtype.element_ty)
    value = tl.load(new_key + NUM_KV_HEADS * HEAD_DIM + d)
    maximum = lowest_scores(query.shape[0])
    total = tl.zeros((query.shape[0],), dtype=tl.float32)
    mixed = tl.zeros(query.shape, dtype=tl.float32)
    if end == context_len:
        place = slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + d
        tl.store(k_cache + place, key, mask=slot >= 0)
        tl.store(v_cache + place, value, mask=slot >= 0)
        dots = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
        maximum = dots * (SCALE * 1.4426950408889634)
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
    mixed, maximum, total = _attend_block(query, keys, values, position, old_end, mixed, maximum, total, SCALE)
    for start in range(begin + BLOCK_N, old_end, BLOCK_N):
        position = start + n
        offsets = _offsets(block_table, position, old_end, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)
        keys = tl.load(k_cache + offsets + column)
        values = tl.load(v_cache + offsets + column)
        mixed, maximum, total = _attend_block(query, keys, values, position, old_end, mixed, maximum, total, SCALE)
    pair = sequence * NUM_KV_HEADS + kv_head
    if context_len <= split_len:
        _store_whole(out, pair, mixed, total, GROUP, HEAD_DIM)
    else:
        parts += kv_head * (num_sequences + extra_splits) * GROUP * (HEAD_DIM + 4)
        _store_part(parts, tl.program_id(1), mixed, maximum, total, GROUP, HEAD_DIM)
        num_parts = tl.cdiv(context_len, split_len)
        if arrives_last(counters + pair, num_parts):
            first_extra = num_sequences
            if not SINGLE:
                first_extra += splits_before(sequence, context_lens, num_sequences, split_len, 0, SCAN)
            _merge(out, parts, pair, sequence, first_extra, num_parts, GROUP, HEAD_DIM)


@jit
def _offsets(
    block_table: Pointer,
    position: Scalar,
    end: Scalar,
    BLOCK_SIZE: constexpr,
    SLOT_WIDTH: constexpr,
    WIDE: constexpr,
) -> Scalar:
    known = tl.maximum(tl.minimum(position, end - 1), 0)
    return cache_offsets(block_table, known, BLOCK_SIZE, SLOT_WIDTH, WIDE)[:, None]


@jit
def _attend_block(
    query: Scalar,
    keys: Scalar,
    values: Scalar,
    position: Scalar,
    end: Scalar,
    mixed: Scalar,
    maximum: Scalar,
    total: Scalar,
    SCALE: constexpr,
) -> Scalar:
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (SCALE * 1.4426950408889634)
    scores = tl.where((position < end)[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return mixed, new_maximum, total
