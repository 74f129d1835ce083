"""Self-attention between its two projections: turn, store, attend."""

from __future__ import annotations

import torch

from legato.kernels.chunk_attention import chunk_attention
from legato.kernels.decode_attention import decode_attention
from legato.kernels.paged_attention import paged_attention
from legato.kernels.paged_kv import PagedKV, Scoring
from legato.kernels.prompt_attention import num_calls, prompt_attention
from legato.kernels.rotary import rotary_and_store
from legato.layers.kv_cache import LayerCache
from legato.layers.rotary import Rotary, rotate
from legato.layers.step import Step

# Prompts of many different lengths would be many calls, and then one launch of our own kernel is sooner done.
MOST_CALLS = 2


class SelfAttention:
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, rotary: Rotary, scale: float) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.scoring = Scoring(scale)

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        """qkv [T, (num_heads + 2 num_kv_heads) head_dim], the packed projection -> [T, num_heads head_dim]."""
        if step.on_host is None:
            return self._with_kernels(qkv, cache, step)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        # Queries and keys turn by the same angles: one call for both.
        turned = rotate(heads[:, : self.num_heads + self.num_kv_heads], *self.rotary.table(step))
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        v = heads[:, self.num_heads + self.num_kv_heads :]
        cache.store(k, v, step.slots)
        return paged_attention(q, k, v, cache.keys, cache.values, step.on_host, self.scoring.scale).flatten(1)

    def _with_kernels(self, qkv: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        rotary_and_store(qkv, step.positions, self.rotary.cos_sin, cache.keys, cache.values, step.slots)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        d, chunks = step.num_decodes, step.chunks
        whole = chunks.whole_prompts if chunks is not None else None
        if d == 0 and whole is not None and num_calls(whole) <= MOST_CALLS:
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            return prompt_attention(q, k, v, whole, self.scoring.scale).flatten(1)
        q = heads[:, : self.num_heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if d:
            kv = PagedKV(cache.keys, cache.values, step.block_tables, step.context_lens[:d], step.rows[:d])
            decode_attention(q[:d], kv, self.scoring, out[:d])
        if chunks is not None:
            kv = PagedKV(cache.keys, cache.values, step.block_tables, step.context_lens[d:], step.rows[d:])
            chunk_attention(q[d:], kv, chunks.cu_seqlens_q, self.scoring, out[d:])
        return out.flatten(1)
