"""Paged, ragged, causal attention: queries of n sequences, packed end to end, against keys and values in blocks.

Sequence i brings `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens, whose keys and values are in the
blocks of row i of `block_tables`. Decodes (one query) come first, prompt chunks behind them.

`paged_attention_reference` defines the result. `paged_attention` gives the same on a CPU, through torch's fused
attention wherever scores are not capped: decodes are gathered and padded in groups of like length, chunks go one by
one. What a score gets besides its dot product (windows, ALiBi) is a bias, computed once a step for all layers that
share it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from legato.kernels.kv_format import KVScales, gather
from legato.kernels.paged_kv import Scoring


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes of similar context length: tokens [first, last) of the step, padded to the longest of them."""

    first: int
    last: int
    slots: torch.Tensor  # [count * longest] int64, the padding repeats a valid slot
    side_by_side: slice | None  # the same slots, if they are neighbours: then they are read where they are
    mask: torch.Tensor | None  # [count, 1, 1, longest], 0 or -inf; None if nothing is padded


@dataclass(frozen=True)
class Chunk:
    """A prompt chunk: tokens [first, last) of the step. `slots` is None if its context is the chunk itself."""

    first: int
    last: int
    slots: torch.Tensor | None  # [context_len] int64
    mask: torch.Tensor | None  # [query_len, context_len], 0 or -inf


@dataclass(frozen=True)
class Biases:
    """What is added to the scores: for each group [count, kv_heads or 1, heads of one or 1, longest], for each chunk
    [kv_heads or 1, heads of one or 1, query_len, context_len]. None: nothing, or what causality alone asks for."""

    groups: list[torch.Tensor | None]
    chunks: list[torch.Tensor | None]


@dataclass(frozen=True)
class PagedContext:
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int  # leading sequences with one query
    block_tables: torch.Tensor  # [n, max_blocks] int32
    block_size: int
    dtype: torch.dtype = torch.float32
    _biases: dict[Hashable, Biases] = field(default_factory=dict)

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
        slots = slots.flatten()
        # A request that had the machine to itself has its blocks in order; a batch has them scattered.
        side_by_side = slice(int(slots[0]), int(slots[-1]) + 1) if last - first == 1 and _in_order(slots) else None
        return DecodeGroup(first, last, slots, side_by_side, mask)

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

    def biases(self, scoring: Scoring, kv_heads: int) -> Biases:
        """Computed once a step for all layers of like scoring. Slopes are told apart by where they are."""
        slopes, longest = scoring.alibi_slopes, max(self.context_lens)
        if slopes is None and (not scoring.window or longest <= scoring.window):
            return self._plain_biases
        key = (scoring.window, None if slopes is None else slopes.data_ptr())
        if key not in self._biases:
            by_head = None if slopes is None else slopes.to(self.dtype).view(kv_heads, -1)
            self._biases[key] = Biases(
                [self._group_bias(group, by_head, scoring.window) for group in self.decode_groups],
                [self._chunk_bias(chunk, by_head, scoring.window) for chunk in self.chunks],
            )
        return self._biases[key]

    @cached_property
    def _plain_biases(self) -> Biases:
        return Biases([group.mask for group in self.decode_groups], [chunk.mask for chunk in self.chunks])

    def _group_bias(self, group: DecodeGroup, slopes: torch.Tensor | None, window: int) -> torch.Tensor:
        """The heads of one key head stand where queries would."""
        lengths = torch.tensor(self.context_lens[group.first : group.last])
        distance = torch.arange(len(group.slots) // len(lengths)) - (lengths[:, None] - 1)
        hidden = distance > 0
        if window:
            hidden |= distance <= -window
        bias = distance.to(self.dtype)[:, None, None]
        bias = torch.zeros_like(bias) if slopes is None else bias * slopes[:, :, None]
        return bias.masked_fill(hidden[:, None, None], float("-inf"))

    def _chunk_bias(self, chunk: Chunk, slopes: torch.Tensor | None, window: int) -> torch.Tensor:
        query_len = chunk.last - chunk.first
        context_len = query_len if chunk.slots is None else len(chunk.slots)
        distance = torch.arange(context_len) - torch.arange(context_len - query_len, context_len)[:, None]
        hidden = distance > 0
        if window:
            hidden |= distance <= -window
        bias = distance.to(self.dtype)
        bias = torch.zeros_like(bias) if slopes is None else bias * slopes[:, :, None, None]
        return bias.masked_fill(hidden, float("-inf"))


def paged_attention(
    q: torch.Tensor,  # [T, num_heads, head_dim]
    k: torch.Tensor,  # [T, num_kv_heads, head_dim], this step's keys, as they are in the cache
    v: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,
    context: PagedContext,
    scoring: Scoring,
    scales: KVScales | None = None,  # of the cache, and of k and v
) -> torch.Tensor:
    if scales is not None:
        scaled = replace(scoring, scale=scoring.scale * scales.keys)
        return paged_attention(q, k, v, k_cache, v_cache, context, scaled).mul_(scales.values)
    assert q.shape[0] == sum(context.query_lens) and q.shape[1] % k_cache.shape[2] == 0, (q.shape, k_cache.shape)
    (_, num_heads, head_dim), kv_heads = q.shape, k_cache.shape[2]
    k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    biases = context.biases(scoring, kv_heads)
    out = torch.empty_like(q)
    for group, bias in zip(context.decode_groups, biases.groups, strict=True):
        count = group.last - group.first
        # The heads that share a key head stand where queries would: no key is read twice, no mask between them.
        queries = q[group.first : group.last].view(count, kv_heads, num_heads // kv_heads, head_dim)
        keys, values = (_of_group(slots, group, q.dtype) for slots in (k_slots, v_slots))
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, kv_heads, -1, 1)
        mixed = _attend(queries, keys, values, bias, False, scoring, sinks)
        out[group.first : group.last] = mixed.view(count, num_heads, head_dim)
    for chunk, bias in zip(context.chunks, biases.chunks, strict=True):
        here = slice(chunk.first, chunk.last)
        keys, values = k[here], v[here]
        if chunk.slots is not None:
            keys, values = (gather(slots, chunk.slots, q.dtype) for slots in (k_slots, v_slots))
        out[here] = _attend_chunk(q[here], keys, values, bias, scoring)
    return out


def _in_order(slots: torch.Tensor) -> bool:
    return bool((slots.diff() == 1).all())


def _of_group(cached: torch.Tensor, group: DecodeGroup, dtype: torch.dtype) -> torch.Tensor:
    """[num_slots, kv_heads, head_dim] -> [count, kv_heads, longest, head_dim]."""
    if group.side_by_side is not None:
        chosen = cached[group.side_by_side].to(dtype)
    else:
        chosen = gather(cached, group.slots, dtype)
    return chosen.view(group.last - group.first, -1, *cached.shape[1:]).transpose(1, 2)


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """One sequence. Key heads take the place of the batch, so that sharing them is a stride of 0 and not a copy."""
    (length, num_heads, head_dim), kv_heads = q.shape, k.shape[1]
    group = num_heads // kv_heads
    queries = q.view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1)[:, None].expand(kv_heads, group, k.shape[0], head_dim)
    values = v.transpose(0, 1)[:, None].expand(kv_heads, group, v.shape[0], head_dim)
    sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, group, 1, 1)
    mixed = _attend(queries, keys, values, bias, bias is None, scoring, sinks)
    return mixed.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[a, b, queries, head_dim] against [a, b, keys, head_dim]. A bias says itself what is causal; sinks are shaped
    like scores, with one key."""
    cap = scoring.soft_cap
    if not cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scoring.scale)
    scores = q @ k.transpose(-1, -2)
    scores = scores.mul_(scoring.scale / cap).tanh_().mul_(cap) if cap else scores.mul_(scoring.scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    elif bias is not None:
        scores += bias
    if sinks is None:
        return scores.softmax(-1) @ v
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, one_more), dim=-1).softmax(-1)[..., :-1] @ v


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context: PagedContext,
    scoring: Scoring,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """The definition, in float64, token by token: softmax over the visible scores, times the values."""
    out, first = torch.empty_like(q), 0
    group = q.shape[1] // k_cache.shape[2]
    for i, (query_len, context_len) in enumerate(zip(context.query_lens, context.context_lens, strict=True)):
        slots = context._slots(slice(i, i + 1), torch.arange(context_len)[None])[0]
        keys = k_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
        values = v_cache.flatten(0, 1)[slots].double().repeat_interleave(group, dim=1)
        if scales is not None:
            keys, values = keys * scales.keys, values * scales.values
        for j in range(query_len):
            last = context_len - query_len + j
            seen = slice(max(0, last + 1 - scoring.window) if scoring.window else 0, last + 1)
            scores = torch.einsum("hd,lhd->hl", q[first + j].double(), keys[seen]) * scoring.scale
            if scoring.soft_cap:
                scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
            if scoring.alibi_slopes is not None:
                scores += scoring.alibi_slopes[:, None].double() * (torch.arange(seen.start, seen.stop) - last)
            if scoring.sinks is not None:
                scores = torch.cat((scores, scoring.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : seen.stop - seen.start]
            out[first + j] = torch.einsum("hl,lhd->hd", weights, values[seen]).to(q.dtype)
        first += query_len
    return out
