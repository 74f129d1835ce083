"""Attention of one query per sequence over its paged context: the decode step.

Reading the cache is all the cost. A program takes one sequence, one key-value head and one split of the context, with
all query heads of that head as the rows of its matrix products, so every key is read once. The grid depends on shapes
alone, never on lengths, so a CUDA graph can replay it. It has a program for the first split of every sequence and some
more, which find out themselves whom they belong to: contexts are cut into splits of one length for all, so that a long
one among short ones has many. Programs that are left over return at once, and the last one of a sequence and head to
finish merges the parts of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.attention.configs import DecodeConfig, decode_config, fitting, scanned
from legato.kernels.attention.splits import choose_split_len, find_sequence, shortest_split_len, splits_before, visible
from legato.kernels.device import limits_of
from legato.kernels.language import (
    Pointer,
    Scalar,
    compile_time,
    constexpr,
    jit,
    jit_for_any,
    kernel_or_torch,
    padded,
    tl,
)
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.paged_kv import (
    PagedKV,
    Scoring,
    base2_scores,
    cache_offsets,
    check_queries,
    find_table,
    load_heads,
    lowest_scores,
    ragged_attention_torch,
    sink_scores,
)


def decode_attention(
    q: Tensor, kv: PagedKV, scoring: Scoring, out: Tensor | None = None, config: DecodeConfig | None = None
) -> Tensor:
    """q [n, num_heads, head_dim], one query for each sequence of `kv`. An empty context gives zeros."""
    check_queries(q, kv)
    assert q.shape[0] == kv.num_sequences, (q.shape, kv.num_sequences)
    assert out is None or (out.shape == q.shape and out.is_contiguous()), "out must be contiguous and shaped like q"
    return kernel_or_torch(q, _decode_attention_triton, _decode_attention_torch)(q, kv, scoring, out, config)


def _decode_attention_torch(
    q: Tensor, kv: PagedKV, scoring: Scoring, out: Tensor | None = None, config: DecodeConfig | None = None
) -> Tensor:
    mixed = ragged_attention_torch(q, kv, torch.arange(q.shape[0] + 1), scoring)
    return mixed if out is None else out.copy_(mixed)


def _decode_attention_triton(
    q: Tensor, kv: PagedKV, scoring: Scoring, out: Tensor | None = None, config: DecodeConfig | None = None
) -> Tensor:
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, kv.k_cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_sequences == 0:
        return out
    assert num_sequences * num_kv_heads <= NUM_COUNTERS, (num_sequences, num_kv_heads)
    config = config or decode_config(num_sequences, num_kv_heads)
    config = fitting(config, num_heads // num_kv_heads, head_dim, q.element_size(), limits_of(q))
    num_splits = num_sequences + config.extra_splits
    # A part is the sum of values, then the largest score and the sum of weights; 4 more keep its rows aligned.
    num_parts = num_splits * num_heads if config.extra_splits > 0 else 0
    _decode_kernel[(num_kv_heads, num_splits)](
        out,
        q,
        kv.k_cache,
        kv.v_cache,
        kv.block_tables,
        kv.context_lens,
        kv.rows,
        kv.k_scale,
        kv.v_scale,
        scoring.alibi_slopes,
        scoring.sinks,
        torch.empty(num_parts, head_dim + 4, dtype=torch.float32, device=q.device),
        arrival_counters(q.device),
        num_sequences,
        q.stride(0),
        kv.block_tables.stride(0),
        config.extra_splits,
        config.min_split_len,
        **kv.constants(),
        **scoring.constants(),
        GROUP=num_heads // num_kv_heads,
        CAN_SPLIT=config.extra_splits > 0,
        BLOCK_N=config.block_n,
        SCAN=scanned(num_sequences),
        SINGLE=num_sequences == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(q),
    )
    return out


# Numbers of splits are arguments, so that fewer variants are compiled.
@jit_for_any("context_lens", "rows", "num_sequences", "extra_splits", "min_split_len")
def _decode_kernel(
    out: Pointer,
    q: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    block_tables: Pointer,
    context_lens: Pointer,
    rows: Pointer,
    k_scale: Scalar,
    v_scale: Scalar,
    alibi_slopes: Pointer,
    sinks: Pointer,
    parts: Pointer,
    counters: Pointer,
    num_sequences: Scalar,
    q_stride: Scalar,
    table_stride: Scalar,
    extra_splits: Scalar,
    min_split_len: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_N: constexpr,
    CAN_SPLIT: constexpr,
    SCAN: constexpr,
    SINGLE: constexpr,
    SCALE: constexpr,
    SOFT_CAP: constexpr,
    WINDOW: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(0)  # fastest, so that neighbours read the heads of the same slots
    sequence = tl.program_id(1)
    split = 0
    split_len = 1 << 30
    if SINGLE and CAN_SPLIT:  # a lone stream: nothing to look up, which is a microsecond a layer
        sequence = 0
        split = tl.program_id(1)
        length = visible(tl.load(context_lens), WINDOW)
        split_len = shortest_split_len(length, extra_splits, min_split_len, BLOCK_N)
        if (split > 0) & (split * split_len >= length):
            return
    elif CAN_SPLIT:
        split_len = choose_split_len(context_lens, num_sequences, extra_splits, min_split_len, BLOCK_N, WINDOW, SCAN)
        if sequence >= num_sequences:
            place = sequence - num_sequences
            sequence, first_place = find_sequence(place, context_lens, num_sequences, split_len, WINDOW, SCAN)
            if sequence >= num_sequences:
                return
            split = 1 + place - first_place
    context_len = tl.load(context_lens + sequence)
    visible_len = visible(context_len, WINDOW)
    begin = context_len - visible_len + split * split_len
    end = tl.minimum(begin + split_len, context_len)
    pair = sequence * NUM_KV_HEADS + kv_head
    mixed, maximum, total = _attend(
        q + sequence * q_stride,
        k_cache,
        v_cache,
        find_table(block_tables, rows, sequence, table_stride),
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
        kv_head,
        split,
        begin,
        end,
        context_len,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        SCALE,
        SOFT_CAP,
        WIDE,
    )
    if (not CAN_SPLIT) or (visible_len <= split_len):
        _store_whole(out, pair, mixed, total, GROUP, HEAD_DIM)
    else:
        # Parts are where the programs are in the grid.
        parts += kv_head * (num_sequences + extra_splits) * GROUP * (HEAD_DIM + 4)
        _store_part(parts, tl.program_id(1), mixed, maximum, total, GROUP, HEAD_DIM)
        num_parts = tl.cdiv(visible_len, split_len)
        if arrives_last(counters + pair, num_parts):
            first_extra = num_sequences
            if not SINGLE:
                first_extra += splits_before(sequence, context_lens, num_sequences, split_len, WINDOW, SCAN)
            _merge(out, parts, pair, sequence, first_extra, num_parts, GROUP, HEAD_DIM)


@jit
def _attend(
    q: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    block_table: Pointer,
    k_scale: Scalar,
    v_scale: Scalar,
    alibi_slopes: Pointer,
    sinks: Pointer,
    kv_head: Scalar,
    split: Scalar,
    begin: Scalar,
    end: Scalar,
    context_len: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_N: constexpr,
    SCALE: constexpr,
    SOFT_CAP: constexpr,
    WIDE: constexpr,
) -> Scalar:
    """Softmax over positions [begin, end) in one pass: the sum of values, the largest score, the sum of weights."""
    h = tl.arange(0, padded(GROUP, 16))  # the smallest matrix product has 16 rows
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, padded(HEAD_DIM, 16))
    head = kv_head * GROUP + h
    inside = (h < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=h < GROUP, other=0.0)
    mixed = tl.zeros(query.shape, dtype=tl.float32)
    maximum = lowest_scores(query.shape[0])
    total = tl.zeros((query.shape[0],), dtype=tl.float32)
    if sinks is not None:  # counted by the first split
        is_first = split == 0
        maximum = tl.where(is_first, sink_scores(sinks, head, h < GROUP), maximum)
        total = tl.where(is_first, 1.0, total)
    column = (kv_head * HEAD_DIM + d)[None, :]
    for start in range(begin, end, BLOCK_N):
        position = start + n
        # Beyond the end the last key is read again, which spares the loads a mask; its score is hidden.
        known = tl.minimum(position, end - 1)
        offsets = cache_offsets(block_table, known, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)[:, None] + column
        keys = load_heads(k_cache + offsets, d, HEAD_DIM).to(query.dtype)
        values = load_heads(v_cache + offsets, d, HEAD_DIM).to(query.dtype)
        dots = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if k_scale is not None:
            dots *= k_scale
        distance = (position - (context_len - 1))[None, :]
        scores = base2_scores(dots, distance, slopes, SCALE, SOFT_CAP)
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    if v_scale is not None:
        mixed *= v_scale
    return mixed, maximum, total


@jit
def _store_whole(
    out: Pointer, pair: Scalar, mixed: Scalar, total: Scalar, GROUP: constexpr, HEAD_DIM: constexpr
) -> None:
    h = tl.arange(0, mixed.shape[0])[:, None]
    d = tl.arange(0, mixed.shape[1])[None, :]
    # An empty context has no weights to divide by.
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    pointers = out + (pair * GROUP + h) * HEAD_DIM + d
    tl.store(pointers, mixed.to(out.dtype.element_ty), mask=(h < GROUP) & (d < HEAD_DIM))


@jit
def _store_part(
    parts: Pointer,
    place: Scalar,
    mixed: Scalar,
    maximum: Scalar,
    total: Scalar,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
) -> None:
    h = tl.arange(0, mixed.shape[0])
    d = tl.arange(0, mixed.shape[1])
    part = parts + (place * GROUP + h) * (HEAD_DIM + 4)
    tl.store(part[:, None] + d[None, :], mixed, mask=(h < GROUP)[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(part + HEAD_DIM, maximum, mask=h < GROUP)
    tl.store(part + HEAD_DIM + 1, total, mask=h < GROUP)


@compile_time
def _parts_at_once(size: int) -> int:
    """As many parts as fit into the registers of one program: 64 for each thread of four warps."""
    return max(1, min(16, 8192 // size))


@jit
def _merge(
    out: Pointer,
    parts: Pointer,
    pair: Scalar,
    sequence: Scalar,
    first_extra: Scalar,
    num_parts: Scalar,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
) -> None:
    """Add the parts of one sequence and key-value head, several at a time, each scaled to the largest score of all."""
    rows: tl.constexpr = padded(GROUP, 1)
    width: tl.constexpr = padded(HEAD_DIM, 16)
    h = tl.arange(0, rows)
    d = tl.arange(0, width)
    s = tl.arange(0, _parts_at_once(rows * width))
    mixed = tl.zeros((rows, width), dtype=tl.float32)
    maximum = lowest_scores(rows)
    total = tl.zeros((rows,), dtype=tl.float32)
    for first in range(0, num_parts, s.shape[0]):
        split = first + s
        there = (h < GROUP)[:, None] & (split < num_parts)[None, :]
        place = tl.where(split == 0, sequence, first_extra + split - 1)
        part = parts + (place[None, :] * GROUP + h[:, None]) * (HEAD_DIM + 4)
        part_maximum = tl.load(part + HEAD_DIM, mask=there, other=-1.0e30, cache_modifier=".cg")
        part_total = tl.load(part + HEAD_DIM + 1, mask=there, other=0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < HEAD_DIM)[None, None, :]
        part_mixed = tl.load(part[:, :, None] + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=1))
        weights = tl.exp2(part_maximum - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(part_total * weights, axis=1)
        mixed = mixed * decay[:, None] + tl.sum(part_mixed * weights[:, :, None], axis=1)
        maximum = new_maximum
    _store_whole(out, pair, mixed, total, GROUP, HEAD_DIM)
