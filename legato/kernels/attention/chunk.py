"""Causal attention of several queries per sequence over its paged context: prompt chunks.

A program takes a tile of queries of one sequence and one key-value head: some tokens times all query heads of that
head, so that short chunks fill the tile too. Tiles are numbered over the whole batch and find their sequence
themselves, so the grid needs no lengths, and a few tiles too many return at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.kernels.attention.hopper import hopper_attention, suits
from legato.kernels.attention.tiles import find_tile
from legato.kernels.device import DEFAULT, AttentionTile, GpuLimits, limits_of
from legato.kernels.language import (
    Pointer,
    Scalar,
    constexpr,
    jit,
    jit_for_any,
    kernel_or_torch,
    next_power_of_two,
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


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    block_m: int  # rows of a tile: tokens times query heads per key-value head
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int


def chunk_config(
    rows_per_sequence: int, group: int, head_dim: int, itemsize: int = 2, limits: GpuLimits = DEFAULT
) -> ChunkConfig:
    """By the rows that an average sequence brings: short chunks would leave a large tile empty.

    Weights are rounded relative to the largest score so far. With 128 keys at a time, from the first one on, that is
    what cuDNN does, and so transformers: the results are the same, bit for bit. 64 at a time would be faster by a
    fifth, which is half a percent of a step, and would cost one token in forty in bfloat16. So a device with less
    shared memory gets fewer rows first, then fewer keys.
    """
    config = _preferred(rows_per_sequence, head_dim, itemsize)
    fewest_rows = next_power_of_two(group, 16)
    while True:
        block_m = max(config.block_m, fewest_rows)
        if AttentionTile(block_m, config.block_n, head_dim, itemsize, config.num_stages).fits(limits):
            return config
        if block_m > max(64, fewest_rows):
            config = replace(config, block_m=64, num_warps=4)
        elif config.num_stages > 2:
            config = replace(config, num_stages=2)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1:
            config = replace(config, num_stages=1)
        elif block_m > fewest_rows:
            config = replace(config, block_m=config.block_m // 2)
        elif config.block_n > 16:
            config = replace(config, block_n=16)
        else:
            return config  # it does not fit, and `kernel_or_torch` takes torch


def _preferred(rows_per_sequence: int, head_dim: int, itemsize: int) -> ChunkConfig:
    if itemsize > 2:  # multiplied without matrix units: larger tiles do not fit the registers and compile for a minute
        if head_dim > 128:
            return ChunkConfig(block_m=16, block_n=32, num_warps=4, num_stages=2)
        return ChunkConfig(block_m=64 if rows_per_sequence > 16 else 16, block_n=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return ChunkConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    if rows_per_sequence <= 16:
        return ChunkConfig(block_m=16, block_n=128, num_warps=4, num_stages=2)
    if rows_per_sequence <= 64:
        return ChunkConfig(block_m=64, block_n=128, num_warps=4, num_stages=2)
    return ChunkConfig(block_m=128, block_n=128, num_warps=8, num_stages=2)


def chunk_attention(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    scoring: Scoring,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
) -> Tensor:
    """q [T, num_heads, head_dim]; sequence i owns the queries from cu_seqlens_q[i] to cu_seqlens_q[i + 1].

    They are the last of its context. q begins with the query cu_seqlens_q[0], so parts of a batch need no new sums.
    A sequence without a context is left out, and so is what lies behind the last one: `out` stays as it is there.
    """
    check_queries(q, kv)
    assert cu_seqlens_q.shape == (kv.num_sequences + 1,), (cu_seqlens_q.shape, kv.num_sequences)
    assert out is None or (out.shape == q.shape and out.is_contiguous()), "out must be contiguous and shaped like q"
    run = kernel_or_torch(q, _chunk_attention_triton, _chunk_attention_torch)
    if config is None and suits(q, kv, scoring):
        run = kernel_or_torch(q, _hopper_attention, run)
    return run(q, kv, cu_seqlens_q, scoring, out, config)


def _chunk_attention_torch(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    scoring: Scoring,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
) -> Tensor:
    return ragged_attention_torch(q, kv, cu_seqlens_q, scoring, out)


def _hopper_attention(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    scoring: Scoring,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    return hopper_attention(q, kv, cu_seqlens_q, scoring, out)


def _chunk_attention_triton(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    scoring: Scoring,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
) -> Tensor:
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, kv.k_cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    rows_per_sequence = num_tokens * group // kv.num_sequences
    config = config or chunk_config(rows_per_sequence, group, head_dim, q.element_size(), limits_of(q))
    block_m = max(config.block_m, next_power_of_two(group))
    num_tiles = num_tokens // (block_m // group) + kv.num_sequences
    _chunk_kernel[(num_kv_heads, num_tiles)](
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
        cu_seqlens_q,
        kv.num_sequences,
        q.stride(0),
        kv.block_tables.stride(0),
        **kv.constants(),
        **scoring.constants(),
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        num_warps=max(config.num_warps, block_m // 16),
        num_stages=config.num_stages,
        **launch_options(q),
    )
    return out


@jit_for_any("context_lens", "rows", "cu_seqlens_q", "num_sequences")
def _chunk_kernel(
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
    cu_seqlens_q: Pointer,
    num_sequences: Scalar,
    q_stride: Scalar,
    table_stride: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    SCALE: constexpr,
    SOFT_CAP: constexpr,
    WINDOW: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(0)
    # The last tiles of a sequence have the longest contexts: they start first, so that no long one is left to the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    tokens: tl.constexpr = BLOCK_M // GROUP
    sequence, first_query, num_queries, first_token = find_tile(tile, cu_seqlens_q, num_sequences, tokens)
    context_len = tl.load(context_lens + sequence)
    if (first_token >= num_queries) | (context_len == 0):
        return
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, padded(HEAD_DIM, 16))[None, :]
    token = first_token + r // GROUP
    head = (kv_head * GROUP + r % GROUP)[:, None]
    inside = ((r < tokens * GROUP) & (token < num_queries))[:, None] & (d < HEAD_DIM)
    first_position = context_len - num_queries + first_token
    query = (first_query + token).to(tl.int64)[:, None]
    mixed = _attend(
        tl.load(q + query * q_stride + head * HEAD_DIM + d, mask=inside, other=0.0),
        k_cache,
        v_cache,
        find_table(block_tables, rows, sequence, table_stride),
        k_scale,
        v_scale,
        alibi_slopes,
        sinks,
        kv_head,
        first_position,
        first_position + tl.minimum(tokens, num_queries - first_token) - 1,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        SCALE,
        SOFT_CAP,
        WINDOW,
        WIDE,
    )
    tl.store(out + (query * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + d, mixed.to(out.dtype.element_ty), mask=inside)


@jit
def _attend(
    query: Scalar,
    k_cache: Pointer,
    v_cache: Pointer,
    block_table: Pointer,
    k_scale: Scalar,
    v_scale: Scalar,
    alibi_slopes: Pointer,
    sinks: Pointer,
    kv_head: Scalar,
    first_position: Scalar,
    last_position: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_N: constexpr,
    SCALE: constexpr,
    SOFT_CAP: constexpr,
    WINDOW: constexpr,
    WIDE: constexpr,
) -> Scalar:
    """Softmax-weighted values for the queries at [first_position, last_position], GROUP rows to each."""
    r = tl.arange(0, query.shape[0])
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, query.shape[1])
    query_position = (first_position + r // GROUP)[:, None]
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + kv_head * GROUP + r % GROUP)
    mixed = tl.zeros(query.shape, dtype=tl.float32)
    maximum = lowest_scores(query.shape[0])
    total = tl.zeros((query.shape[0],), dtype=tl.float32)
    if sinks is not None:
        maximum = sink_scores(sinks, kv_head * GROUP + r % GROUP, r >= 0)
        total += 1.0
    column = (kv_head * HEAD_DIM + d)[None, :]
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    for start in range(begin, last_position + 1, BLOCK_N):
        position = start + n
        # Beyond the end the last key is read again, which spares the loads a mask; its score is hidden.
        known = tl.minimum(position, last_position)
        offsets = cache_offsets(block_table, known, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)[:, None] + column
        keys = load_heads(k_cache + offsets, d, HEAD_DIM).to(query.dtype)
        values = load_heads(v_cache + offsets, d, HEAD_DIM).to(query.dtype)
        dots = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if k_scale is not None:
            dots *= k_scale
        distance = position[None, :] - query_position
        scores = base2_scores(dots, distance, slopes, SCALE, SOFT_CAP)
        if WINDOW > 0:
            scores = tl.where((distance <= 0) & (distance > -WINDOW), scores, float("-inf"))
        elif start + BLOCK_N > first_position + 1:
            scores = tl.where(distance <= 0, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    if v_scale is not None:
        mixed *= v_scale
    return mixed / total[:, None]
