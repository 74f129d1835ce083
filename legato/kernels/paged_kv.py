"""Shared parts of decode and chunk attention: reading the paged context, computing scores, and the reference.

`ragged_attention_torch` defines the result of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.kernels.kv_format import EIGHT_BITS, KVScales, gather
from legato.kernels.language import Pointer, Scalar, constexpr, jit, tl, widened


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of n sequences, in blocks."""

    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor
    block_tables: Tensor  # [n, max_blocks] int32; with `rows` [max_rows, max_blocks]
    context_lens: Tensor  # [n] int32, keys that the last query of a sequence sees, its own included
    rows: Tensor | None = None  # [n] int32: sequence i is row rows[i] of the tables
    scales: KVScales | None = None  # what is stored was divided by them; None: by nothing

    def __post_init__(self) -> None:
        assert self.k_cache.shape == self.v_cache.shape, (self.k_cache.shape, self.v_cache.shape)
        assert self.k_cache.is_contiguous() and self.v_cache.is_contiguous(), self.k_cache.stride()
        assert self.block_tables.stride(1) == 1 and self.context_lens.stride(0) == 1, self.block_tables.stride()
        assert (self.rows if self.rows is not None else self.block_tables).shape[0] == self.num_sequences
        # So kernels that read caches of 16 bits alone know nothing of scales.
        assert self.scales is None or self.k_cache.dtype in EIGHT_BITS, (self.scales, self.k_cache.dtype)

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    def sequences(self, first: int, last: int) -> PagedKV:
        """A view of sequences [first, last)."""
        rows = None if self.rows is None else self.rows[first:last]
        tables = self.block_tables[first:last] if rows is None else self.block_tables
        return PagedKV(self.k_cache, self.v_cache, tables, self.context_lens[first:last], rows, self.scales)

    @property
    def k_scale(self) -> float | None:
        """An argument of kernels, not a constant: every layer has its own, and they share a kernel. None is one, so
        that a kernel without scales has no trace of them."""
        return None if self.scales is None else self.scales.keys

    @property
    def v_scale(self) -> float | None:
        return None if self.scales is None else self.scales.values

    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        return dict(
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            # 64-bit offsets only for caches that need them.
            WIDE=self.k_cache.numel() >= 2**31,
        )


@dataclass(frozen=True, slots=True)
class Scoring:
    """From the dot product of a query and a key to its score."""

    scale: float
    alibi_slopes: Tensor | None = None  # [num_heads] float32, on key minus query position
    window: int = 0  # a query sees this many keys, its own included; 0: all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(scores / soft_cap); 0: off
    sinks: Tensor | None = None  # [num_heads] float32: the score of one more key, whose value is zero

    def constants(self) -> dict[str, Any]:
        return dict(SCALE=self.scale, WINDOW=self.window, SOFT_CAP=self.soft_cap)


def check_queries(q: Tensor, kv: PagedKV) -> None:
    """[T, num_heads, head_dim]; a view into the packed projection will do."""
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    assert q.shape[2] == head_dim and q.shape[1] % num_kv_heads == 0, (q.shape, kv.k_cache.shape)
    assert q.stride(2) == 1 and q.stride(1) == head_dim, q.stride()
    assert kv.k_cache.dtype in (q.dtype, *EIGHT_BITS), (q.dtype, kv.k_cache.dtype)


def ragged_attention_torch(
    q: Tensor, kv: PagedKV, cu_seqlens_q: Tensor, scoring: Scoring, out: Tensor | None = None
) -> Tensor:
    """Sequence i owns the queries from cu_seqlens_q[i] to cu_seqlens_q[i + 1], the last ones of its context.

    The first query is that of cu_seqlens_q[0], which need not be 0. `out` stays as it is where a sequence without a
    context has its queries, and behind the last sequence.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, context_lens = (cu_seqlens_q - cu_seqlens_q[0]).tolist(), kv.context_lens.tolist()
    block_size, group = kv.k_cache.shape[1], q.shape[1] // kv.k_cache.shape[2]
    for i, context_len in enumerate(context_lens):
        here = slice(starts[i], starts[i + 1])
        if context_len == 0 or here.start == here.stop:
            continue
        table = kv.block_tables[i if kv.rows is None else int(kv.rows[i])].long()
        positions = torch.arange(context_len, device=q.device)
        slots = table[positions // block_size] * block_size + positions % block_size
        keys, values = (
            widened(gather(cache.flatten(0, 1), slots, q.dtype)).repeat_interleave(group, dim=1)
            for cache in (kv.k_cache, kv.v_cache)
        )
        if kv.scales is not None:
            keys, values = keys * kv.scales.keys, values * kv.scales.values
        distance = positions - positions[context_len - (here.stop - here.start) :, None]  # [queries, keys]
        scores = _scores_torch(torch.einsum("qhd,khd->hqk", widened(q[here]), keys), distance, scoring)
        out[here] = torch.einsum("hqk,khd->qhd", _softmax_torch(scores, scoring.sinks), values).to(q.dtype)
    return out


def _softmax_torch(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Of [num_heads, queries, keys]."""
    if sinks is None:
        return scores.softmax(-1)
    one_more = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, one_more), dim=-1).softmax(-1)[..., :-1]


def _scores_torch(dots: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    scores = dots * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    if scoring.alibi_slopes is not None:
        scores = scores + scoring.alibi_slopes[:, None, None].to(scores.dtype) * distance
    hidden = distance > 0
    if scoring.window:
        hidden = hidden | (distance <= -scoring.window)
    return scores.masked_fill(hidden, float("-inf"))


@jit
def find_table(block_tables: Pointer, rows: Pointer, sequence: Scalar, table_stride: Scalar) -> Scalar:
    row = sequence
    if rows is not None:
        row = tl.load(rows + sequence)
    return block_tables + row * table_stride


@jit
def cache_offsets(
    block_table: Pointer, position: Scalar, BLOCK_SIZE: constexpr, SLOT_WIDTH: constexpr, WIDE: constexpr
) -> Scalar:
    """Offset of each position's slot from the beginning of the cache."""
    block = tl.load(block_table + position // BLOCK_SIZE)
    if WIDE:
        block = block.to(tl.int64)
    return (block * BLOCK_SIZE + position % BLOCK_SIZE) * SLOT_WIDTH


@jit
def load_heads(pointers: Pointer, column: Scalar, HEAD_DIM: constexpr) -> Scalar:
    """One head of several slots; a mask only where the head is narrower than the tile."""
    if pointers.shape[1] == HEAD_DIM:
        heads = tl.load(pointers)
    else:
        heads = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return heads


@jit
def base2_scores(dots: Scalar, distance: Scalar, slopes: Scalar, SCALE: constexpr, SOFT_CAP: constexpr) -> Scalar:
    """Scores times log2(e), so that their softmax is taken with exp2, which the hardware has.

    `distance` is key minus query position; `slopes`, one for each row of `dots`, may be None.
    """
    if (SOFT_CAP > 0) or (slopes is not None):
        scores = dots * SCALE
        if SOFT_CAP > 0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which saturates at both ends instead of overflowing.
            scores = SOFT_CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFT_CAP)) + 1.0))
        if slopes is not None:
            scores += slopes[:, None] * distance
        scores = scores * 1.4426950408889634
    else:
        scores = dots * (SCALE * 1.4426950408889634)
    return scores


@jit
def sink_scores(sinks: Pointer, head: Scalar, inside: Scalar) -> Scalar:
    """Where running maxima begin if there is one more key, whose value is zero: at its score, in base 2. The running
    sum of weights then begins at one."""
    return tl.load(sinks + head, mask=inside, other=0.0) * 1.4426950408889634


@jit
def lowest_scores(ROWS: constexpr) -> Scalar:
    """Where running maxima begin: below every score, yet finite, so that a row that sees no key gives 0 and not NaN."""
    return tl.full((ROWS,), -1.0e30, dtype=tl.float32)
