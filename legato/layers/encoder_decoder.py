"""Attention between encoder and decoder, as T5 has it: scores are dot products and a bias by distance, nothing else;
BART has not even the bias.

What the encoder made of a prompt is in the cache in the prompt's slots, so the decoder's layers read it where they read
their own past: both are spans of one sequence's slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.kernels.attention.span import span_attention
from legato.kernels.paged_kv import PagedKV
from legato.layers.kv_cache import LayerCache
from legato.layers.shard import Heads
from legato.layers.step import Sides, Step


def buckets(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """T5's buckets for distances >= 0: one each for the first half, then ever wider ones up to `max_distance`."""
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distance < exact, distance, wide)


def bias_of_the_past(weight: torch.Tensor, max_distance: int) -> torch.Tensor:
    """[num_buckets, heads] -> [heads, max_distance + 1]: bias by the distance of a key before the query, clamped to
    the last bucket."""
    distance = torch.arange(max_distance + 1, device=weight.device)
    return weight[buckets(distance, weight.shape[0], max_distance)].t().contiguous()


def bias_of_both_sides(weight: torch.Tensor, max_distance: int) -> torch.Tensor:
    """[num_buckets, heads] -> [heads, 2 max_distance + 1]: bias by the distance of a key before and after the query.
    The first half of the buckets is for keys up to the query, the second for keys after it."""
    half = weight.shape[0] // 2
    distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
    return weight[buckets(distance.abs(), half, max_distance) + half * (distance > 0)].t().contiguous()


@dataclass(frozen=True, slots=True)
class PromptAttention:
    """Bidirectional self-attention of an encoder. The bias is `bias_of_both_sides`, fp32; None where positions are in
    the embeddings."""

    heads: Heads
    bias: torch.Tensor | None

    def __call__(self, qkv: torch.Tensor, step: Step, sides: Sides) -> torch.Tensor:
        """[E, heads of q, k and v side by side] -> [E, num_heads head_dim]"""
        packed = qkv.view(len(qkv), 3, self.heads.num_heads, self.heads.head_dim)
        mixed = []
        for prompt in packed.split(sides.prompt_lens):
            q, k, v = prompt.permute(1, 2, 0, 3)[:, None]
            mask = None if self.bias is None else self._mask(self.bias, len(prompt), qkv.dtype, step)
            mixed.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)[0].transpose(0, 1))
        return torch.cat(mixed).flatten(1)

    @staticmethod
    def _mask(bias: torch.Tensor, length: int, dtype: torch.dtype, step: Step) -> torch.Tensor:
        """[1, heads, length, length]; one for all layers and all prompts of a length."""

        def compute() -> torch.Tensor:
            place = torch.arange(length, device=bias.device)
            reach = bias.shape[1] // 2
            distance = (place - place[:, None]).clamp_(-reach, reach)
            return bias.to(dtype)[:, distance + reach][None]

        return step.once(("prompt bias", bias.data_ptr(), length), compute)


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """Causal self-attention of a decoder. The bias is `bias_of_the_past`, fp32, or None."""

    heads: Heads
    bias: torch.Tensor | None

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        """[t, heads of q, k and v side by side] -> [t, num_heads head_dim]. Stores keys and values first."""
        q, k, v = qkv.view(len(qkv), 3, self.heads.num_heads, self.heads.head_dim).unbind(1)
        cache.store(k, v, tokens.slots)
        return span_attention(q, tokens.context(cache, tokens.ends), tokens.encoder_lens, self.bias).flatten(1)


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Cross-attention of decoder tokens to the encoder's output of their prompt, without positions."""

    heads: Heads

    def store(self, kv: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """[E, heads of k and v side by side]"""
        k, v = kv.view(len(kv), 2, self.heads.num_heads, self.heads.head_dim).unbind(1)
        cache.store(k, v, slots)

    def __call__(self, q: torch.Tensor, cache: LayerCache, tokens: DecoderTokens) -> torch.Tensor:
        """[t, num_heads head_dim] -> the same."""
        queries = q.view(len(q), self.heads.num_heads, self.heads.head_dim)
        return span_attention(queries, tokens.context(cache, tokens.encoder_lens), None, None).flatten(1)


@dataclass(frozen=True, slots=True)
class DecoderTokens:
    """Decoder tokens of a step, each a query of its own: tokens of one sequence see each other through the cache."""

    input_ids: torch.Tensor  # [t] int64
    slots: torch.Tensor  # [t] int64
    ends: torch.Tensor  # [t] int32, slots of the sequence up to the token's own
    encoder_lens: torch.Tensor  # [t] int32, those of them that are the prompt's
    rows: torch.Tensor  # [t] int32
    block_tables: torch.Tensor  # [max_rows, max_blocks] int32

    @classmethod
    def of(cls, step: Step, sides: Sides) -> DecoderTokens:
        places = sides.decoder
        ids, slots, positions = (
            tensor if places is None else tensor[places] for tensor in (step.input_ids, step.slots, step.positions)
        )
        return cls(ids, slots, (positions + 1).int(), sides.encoder_lens, sides.rows, step.block_tables)

    def context(self, cache: LayerCache, ends: torch.Tensor) -> PagedKV:
        return cache.paged(self.block_tables, ends, self.rows)
