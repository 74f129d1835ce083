"""Paged, ragged, causal attention: queries of n sequences, packed end to end, against keys and values in blocks.

Sequence i brings `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens, whose keys and values are in the
blocks of row i of `block_tables`. Decodes (one query) come first, prompt chunks behind them.

`paged_attention_reference` defines the result. `_on_cpu` gives the same through torch's fused attention: decodes are
gathered and padded in groups of like length, chunks go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes of similar context length: tokens [first, last) of the step, padded to the longest of them."""

    first: int
    last: int
    slots: torch.Tensor  # [count * longest] int64, the padding repeats a valid slot
    mask: torch.Tensor | None  # [count, 1, 1, longest], 0 or -inf; None if nothing is padded


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk: tokens [first, last) of the step. `slots` is None if its context is the chunk itself."""

    first: int
    last: int
    slots: torch.Tensor | None  # [context_len] int64
    mask: torch.Tensor | None  # [query_len, context_len], 0 or -inf


@dataclass(frozen=True)
class PagedContext:
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int  # leading sequences with one query
    block_tables: torch.Tensor  # [n, max_blocks] int32
    block_size: int
    dtype: torch.dtype = torch.float32

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Computed once a step, used by every layer."""
        groups, first = [], 0
        while first < self.num_decodes:
            last = first + 1
            shortest = longest = self.context_lens[first]
            while last < self.num_decodes:
                length = self.context_lens[last]
                if max(longest, length) > 2 * min(shortest, length) + 64:
                    break  # padding would cost more than another call
                shortest, longest = min(shortest, length), max(longest, length)
                last += 1
            groups.append(self._group(first, last, longest))
            first = last
        return groups

    def _group(self, first: int, last: int, longest: int) -> DecodeGroup:
        lengths = torch.tensor(self.context_lens[first:last])
        positions = torch.arange(longest)
        padded = positions >= lengths[:, None]
        slots = self._slots(slice(first, last), torch.minimum(positions, lengths[:, None] - 1))
        mask = None
        if padded.any():
            mask = torch.zeros(padded.shape, dtype=self.dtype).masked_fill_(padded, float("-inf"))[:, None, None]
        return DecodeGroup(first, last, slots.flatten(), mask)

    def _slots(self, sequences: slice, positions: torch.Tensor) -> torch.Tensor:
        """Physical slots of positions [count, length] of some sequences."""
        tables = self.block_tables[sequences].long()
        blocks = tables.gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    @cached_property
    def chunks(self) -> list[Chunk]:
        chunks, first = [], self.num_decodes
        for i in range(self.num_decodes, len(self.query_lens)):
            query_len, context_len = self.query_lens[i], self.context_lens[i]
            last = first + query_len
            if query_len == context_len:
                chunks.append(Chunk(first, last, None, None))
            else:
                slots = self._slots(slice(i, i + 1), torch.arange(context_len)[None])[0]
                hidden = torch.ones(query_len, context_len, dtype=torch.bool).triu_(context_len - query_len + 1)
                mask = torch.zeros(query_len, context_len, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
                chunks.append(Chunk(first, last, slots, mask))
            first = last
        return chunks


def paged_attention(
    q: torch.Tensor,  # [T, num_heads, head_dim]
    k: torch.Tensor,  # [T, num_kv_heads, head_dim], this step's keys; they are in the cache too
    v: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,
    context: PagedContext,
    scale: float,
) -> torch.Tensor:
    assert q.shape[0] == sum(context.query_lens) and q.shape[1] % k_cache.shape[2] == 0, (q.shape, k_cache.shape)
    return _on_cpu(q, k, v, k_cache.flatten(0, 1), v_cache.flatten(0, 1), context, scale)


def _on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    context: PagedContext,
    scale: float,
) -> torch.Tensor:
    _, num_heads, head_dim = q.shape
    kv_heads = k_slots.shape[1]
    out = torch.empty_like(q)
    for group in context.decode_groups:
        count = group.last - group.first
        # The heads that share a key head stand where queries would: no key is read twice, no mask between them.
        queries = q[group.first : group.last].view(count, kv_heads, num_heads // kv_heads, head_dim)
        keys = k_slots.index_select(0, group.slots).view(count, -1, kv_heads, head_dim).transpose(1, 2)
        values = v_slots.index_select(0, group.slots).view(count, -1, kv_heads, head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
        out[group.first : group.last] = mixed.view(count, num_heads, head_dim)
    for chunk in context.chunks:
        here = slice(chunk.first, chunk.last)
        keys, values = (k[here], v[here]) if chunk.slots is None else (k_slots[chunk.slots], v_slots[chunk.slots])
        out[here] = _attend_chunk(q[here], keys, values, chunk.mask, scale)
    return out


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One sequence. Key heads take the place of the batch, so that sharing them is a stride of 0 and not a copy."""
    (length, num_heads, head_dim), kv_heads = q.shape, k.shape[1]
    group = num_heads // kv_heads
    queries = q.view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1)[:, None].expand(kv_heads, group, k.shape[0], head_dim)
    values = v.transpose(0, 1)[:, None].expand(kv_heads, group, v.shape[0], head_dim)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return mixed.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def paged_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: PagedContext, scale: float
) -> torch.Tensor:
    """The definition, in float64: softmax(q k / sqrt(d)) v over the cached context, token by token."""
    out, first = torch.empty_like(q), 0
    group = q.shape[1] // k_cache.shape[2]
    for i, (query_len, context_len) in enumerate(zip(context.query_lens, context.context_lens, strict=True)):
        slots = context._slots(slice(i, i + 1), torch.arange(context_len)[None])[0]
        keys = k_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
        values = v_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
        for j in range(query_len):
            visible = context_len - query_len + j + 1
            scores = torch.einsum("hd,lhd->hl", q[first + j].double(), keys[:visible]) * scale
            out[first + j] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values[:visible]).to(q.dtype)
        first += query_len
    return out
