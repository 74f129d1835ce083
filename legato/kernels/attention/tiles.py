"""Tiles of prompt chunks: which sequence a tile belongs to, and how the tiles of the last wave are split.

A multiprocessor computes one tile at a time, and all tiles of a long context take about as long. So tiles run in waves,
and a last wave of few tiles costs as much as a full one: 280 tiles on 132 multiprocessors take three waves instead of
2.1. The tiles that would be the last wave are therefore split along their context, each part leaves its sums in memory,
and a second kernel merges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, jit_for_any, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.paged_kv import PagedKV, lowest_scores

MAX_SPLITS = 8
# With more waves than these the last one is a small part of the time.
MAX_WAVES = 8
# Of the last wave. Less is not worth storing and merging parts.
LEAST_GAIN = 0.15
# Blocks of keys in a part; tiles with shorter contexts stay whole.
MIN_BLOCKS = 4
MERGED_ROWS = 16


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The first `num_tiles` tiles, which are started last, are split into `num_splits` parts each."""

    num_tiles: int
    num_splits: int

    @property
    def num_parts(self) -> int:
        return self.num_tiles * self.num_splits


def split_plan(num_tiles: int, num_kv_heads: int, num_multiprocessors: int) -> SplitPlan:
    """From sizes that the host knows. Contexts it does not know: a kernel leaves short ones whole."""
    num_waves, rest = divmod(num_tiles * num_kv_heads, num_multiprocessors)
    num_last = ceil_div(rest, num_kv_heads)

    def last_wave(num_splits: int) -> float:
        return ceil_div(num_last * num_kv_heads * num_splits, num_multiprocessors) / num_splits

    num_splits = min(range(1, MAX_SPLITS + 1), key=last_wave)
    if rest == 0 or num_waves >= MAX_WAVES or last_wave(num_splits) > 1 - LEAST_GAIN:
        return SplitPlan(0, 1)
    return SplitPlan(num_last, num_splits)


def new_parts(plan: SplitPlan, num_kv_heads: int, block_m: int, head_dim: int, device: torch.device) -> Tensor:
    """Of every part and row the sum of values, the largest score and the sum of weights."""
    return torch.empty(plan.num_parts * num_kv_heads, block_m, head_dim + 2, dtype=torch.float32, device=device)


def merge_parts(
    parts: Tensor, plan: SplitPlan, kv: PagedKV, cu_seqlens_q: Tensor, out: Tensor, block_m: int, block_n: int
) -> None:
    """out [T, num_heads, head_dim], where the tiles of `plan` are. `parts` as the attention kernel leaves them."""
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    _merge_parts_kernel[(num_kv_heads, plan.num_tiles, block_m // MERGED_ROWS)](
        out,
        parts,
        kv.context_lens,
        cu_seqlens_q,
        kv.num_sequences,
        plan.num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=out.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        MIN_BLOCKS=MIN_BLOCKS,
        ROWS=MERGED_ROWS,
        num_warps=4,
        **launch_options(out),
    )


@jit
def find_tile(tile: Scalar, cu_seqlens_q: Pointer, num_sequences: Scalar, TOKENS: constexpr) -> Scalar:
    """The tile's sequence, that sequence's first query and number of queries, and the tile's first token among them.

    Sequence i begins with tile first_query // TOKENS + i, which leaves each at least the tiles it needs. Counting all
    beginnings at once costs one round trip to memory where a binary search costs several.
    """
    base = tl.load(cu_seqlens_q)
    found = 0
    for first in range(0, num_sequences, 128):
        i = first + tl.arange(0, 128)
        start = tl.load(cu_seqlens_q + i, mask=i < num_sequences, other=1 << 30) - base
        found += tl.sum((start // TOKENS + i <= tile).to(tl.int32), axis=0)
    sequence = found - 1
    first_query = tl.load(cu_seqlens_q + sequence) - base
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - base - first_query
    return sequence, first_query, num_queries, (tile - first_query // TOKENS - sequence) * TOKENS


@jit_for_any("context_lens", "cu_seqlens_q", "num_sequences", "num_splits")
def _merge_parts_kernel(
    out: Pointer,
    parts: Pointer,
    context_lens: Pointer,
    cu_seqlens_q: Pointer,
    num_sequences: Scalar,
    num_splits: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    MIN_BLOCKS: constexpr,
    ROWS: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    tokens: tl.constexpr = BLOCK_M // GROUP
    sequence, first_query, num_queries, first_token = find_tile(tile, cu_seqlens_q, num_sequences, tokens)
    context_len = tl.load(context_lens + sequence)
    if (first_token >= num_queries) | (context_len == 0):
        return
    last_position = context_len - num_queries + tl.minimum(first_token + tokens, num_queries) - 1
    if last_position // BLOCK_N + 1 < MIN_BLOCKS * num_splits:  # the first part is the whole
        return
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    mixed = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    maximum = lowest_scores(ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for split in range(num_splits):
        place = ((tile * num_splits + split) * NUM_KV_HEADS + kv_head).to(tl.int64)
        part = parts + place * (BLOCK_M * (HEAD_DIM + 2))
        part_maximum = tl.load(part + BLOCK_M * HEAD_DIM + r)
        part_total = tl.load(part + BLOCK_M * (HEAD_DIM + 1) + r)
        part_mixed = tl.load(part + r[:, None] * HEAD_DIM + d[None, :])
        new_maximum = tl.maximum(maximum, part_maximum)
        decay = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(part_maximum - new_maximum)
        total = total * decay + part_total * weight
        mixed = mixed * decay[:, None] + part_mixed * weight[:, None]
        maximum = new_maximum
    token = first_token + r // GROUP
    inside = (r < tokens * GROUP) & (token < num_queries)
    row = (first_query + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    mixed = mixed / tl.where(inside, total, 1.0)[:, None]
    tl.store(out + row[:, None] * HEAD_DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=inside[:, None])
