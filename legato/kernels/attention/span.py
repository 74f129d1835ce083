"""Attention of one query per token over a span of its sequence's slots, with T5's bias by distance.

The cache of an encoder-decoder model has two parts in every sequence: slots [0, n) hold what the encoder made of the
prompt, the slots from n on are the decoder's own. A token attends to the one part and to the other, one span each.

A program takes one token and one head. The grid depends on shapes alone, so a CUDA graph can replay it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.kv_format import gather
from legato.kernels.language import Pointer, Scalar, constexpr, jit_for_any, kernel_or_torch, padded, tl
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.paged_kv import PagedKV, cache_offsets, check_queries, find_table, load_heads, lowest_scores

# Keys per iteration.
BLOCK_N = 64


def span_attention(q: Tensor, kv: PagedKV, begins: Tensor | None, bias: Tensor | None) -> Tensor:
    """q [n, num_heads, head_dim]; query i sees positions [begins[i], kv.context_lens[i]) of sequence i.

    `begins` [n] int32 may be None for all zeros. Scores are plain dot products, plus bias[head, distance] for a key so
    many places before the last of the span; beyond its end the bias [num_heads, distances] float32 goes on with its
    last column. An empty span gives zeros.
    """
    check_queries(q, kv)
    assert kv.scales is None, "no encoder-decoder model has scales of keys and values"
    assert q.shape[0] == kv.num_sequences and q.shape[1] == kv.k_cache.shape[2], (q.shape, kv.k_cache.shape)
    run = kernel_or_torch(q, _span_attention_triton, _span_attention_torch)
    return run(q, kv, begins, bias)


def _span_attention_torch(q: Tensor, kv: PagedKV, begins: Tensor | None, bias: Tensor | None) -> Tensor:
    ends = kv.context_lens.long()[:, None]
    firsts = torch.zeros_like(ends) if begins is None else begins.long()[:, None]
    longest = int((ends - firsts).max()) if len(q) else 0
    if longest <= 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    positions = firsts + torch.arange(longest, device=q.device)
    visible = positions < ends
    positions = torch.minimum(positions, ends - 1).clamp_(min=0)  # beyond the end the last key again, hidden
    tables = kv.block_tables if kv.rows is None else kv.block_tables[kv.rows]
    block_size = kv.k_cache.shape[1]
    blocks = tables.gather(1, positions // block_size).long().masked_fill_(ends <= firsts, 0)
    slots = (blocks * block_size + positions % block_size).flatten()
    keys, values = (
        gather(cache.flatten(0, 1), slots, q.dtype).unflatten(0, (-1, longest)).transpose(1, 2)
        for cache in (kv.k_cache, kv.v_cache)
    )
    scores = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)[:, None]
    if bias is not None:
        distance = (ends - 1 - positions).clamp_(0, bias.shape[1] - 1)
        scores = bias[:, distance].transpose(0, 1).to(q.dtype)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))[:, :, None]
    mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=scores, scale=1.0)[:, :, 0]
    return torch.where((ends > firsts)[:, :, None], mixed, 0)


def _span_attention_triton(q: Tensor, kv: PagedKV, begins: Tensor | None, bias: Tensor | None) -> Tensor:
    num_queries, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return out
    _span_kernel[(num_heads, num_queries)](
        out,
        q,
        kv.k_cache,
        kv.v_cache,
        kv.block_tables,
        begins,
        kv.context_lens,
        kv.rows,
        bias,
        q.stride(0),
        kv.block_tables.stride(0),
        **kv.constants(),
        NUM_DISTANCES=0 if bias is None else bias.shape[1],
        BLOCK_N=BLOCK_N,
        num_warps=4,
        **launch_options(q),
    )
    return out


@jit_for_any("begins", "ends", "rows")
def _span_kernel(
    out: Pointer,
    q: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    block_tables: Pointer,
    begins: Pointer,
    ends: Pointer,
    rows: Pointer,
    bias: Pointer,
    q_stride: Scalar,
    table_stride: Scalar,
    NUM_KV_HEADS: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    NUM_DISTANCES: constexpr,
    BLOCK_N: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    head = tl.program_id(0)  # fastest, so that neighbours read the heads of the same slots
    sequence = tl.program_id(1)
    begin = 0
    if begins is not None:
        begin = tl.load(begins + sequence)
    end = tl.load(ends + sequence)
    block_table = find_table(block_tables, rows, sequence, table_stride)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, padded(HEAD_DIM, 16))
    column = head * HEAD_DIM + d
    query = tl.load(q + sequence * q_stride + column, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    mixed = tl.zeros(query.shape, dtype=tl.float32)
    maximum = lowest_scores(1)
    total = tl.zeros((1,), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + n
        # Beyond the end the last key is read again, which spares the loads a mask; its score is hidden.
        known = tl.minimum(position, end - 1)
        offsets = (
            cache_offsets(block_table, known, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)[:, None] + column[None, :]
        )
        keys = load_heads(k_cache + offsets, d, HEAD_DIM).to(tl.float32)
        values = load_heads(v_cache + offsets, d, HEAD_DIM).to(tl.float32)
        scores = tl.sum(keys * query[None, :], axis=1)
        if bias is not None:
            distance = tl.minimum(end - 1 - known, NUM_DISTANCES - 1)
            scores += tl.load(bias + head * NUM_DISTANCES + distance)
        scores = tl.where(position < end, scores * 1.4426950408889634, float("-inf"))  # for exp2
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=0)
        mixed = mixed * decay + tl.sum(values * weights[:, None], axis=0)
        maximum = new_maximum
    mixed = mixed / tl.where(total > 0.0, total, 1.0)
    place = (sequence * NUM_KV_HEADS + head) * HEAD_DIM + d
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=d < HEAD_DIM)
