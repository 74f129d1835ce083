"""Self-attention between its two projections: rotary embedding, KV store, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from legato.kernels.attention.chunk import chunk_attention
from legato.kernels.attention.decode import decode_attention
from legato.kernels.attention.paged import paged_attention
from legato.kernels.attention.prompt import RepeatedLengths, prompt_attention
from legato.kernels.attention.turned import suits, turned_attention
from legato.kernels.paged_kv import Scoring
from legato.kernels.rotary import rotary_and_store
from legato.layers.kv_cache import LayerCache
from legato.layers.mutual import mutual_attention
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.layers.step import Step

# Shared by all layers: they see the same prompts.
_REPEATED_LENGTHS = RepeatedLengths()

HeadNorm = Callable[[torch.Tensor], torch.Tensor]  # [T, heads, head_dim] -> the same shape


class SelfAttention:
    """One layer's attention over this shard's heads.

    `scale` multiplies the dot products (head_dim ** -0.5 unless said otherwise); `q_norm` and `k_norm` come before the
    rotation; `window` is how many keys a query sees, its own included (0: all); `soft_cap` as Gemma 2's (0: none);
    `slopes` are those of `alibi_slopes`; `sinks` are scores [num_heads] float32 of one more key, whose value is zero.
    Values narrower than keys are stored padded.
    """

    def __init__(
        self,
        heads: Heads,
        rotary: Rotary | None = None,
        *,
        scale: float | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = heads.num_heads
        self.num_kv_heads = heads.num_kv_heads
        self.head_dim = heads.head_dim
        self.v_head_dim = heads.v_head_dim
        self.rotary = rotary
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.scoring = Scoring(heads.head_dim**-0.5 if scale is None else scale, slopes, window, soft_cap, sinks)
        # What torch's own attention can do, given prompts no longer than the window.
        self.is_plain = slopes is None and not soft_cap and sinks is None

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        """qkv [T, heads of q, k and v side by side], the packed projection -> [T, num_heads v_head_dim], or of as many
        tokens as are needed after it. Overwrites `qkv`.
        """
        if self.v_head_dim == self.head_dim:
            return step.needed_after_attention(self._attend(qkv, cache, step))
        num_values = self.num_kv_heads * self.v_head_dim
        values = qkv[:, -num_values:].unflatten(1, (self.num_kv_heads, self.v_head_dim))
        values = F.pad(values, (0, self.head_dim - self.v_head_dim))
        wide = torch.cat((qkv[:, :-num_values], values.flatten(1)), dim=1)
        wide = step.needed_after_attention(self._attend(wide, cache, step))
        return wide.unflatten(1, (self.num_heads, self.head_dim))[:, :, : self.v_head_dim].flatten(1)

    def separate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, step: Step
    ) -> torch.Tensor:
        """For projections that are not one product: q and k [T, heads, head_dim], v [T, heads, v_head_dim]."""
        return self(torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), cache, step)

    def _attend(self, qkv: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_turned = self.num_heads + self.num_kv_heads
        q, k, v = heads[:, : self.num_heads], heads[:, self.num_heads : num_turned], heads[:, num_turned:]
        if self.q_norm is not None:
            q.copy_(self.q_norm(q))
        if self.k_norm is not None:
            k.copy_(self.k_norm(k))
        if step.on_host is None:
            out = self._with_kernels(qkv, cache, step)
        else:
            if self.rotary is not None:
                # Queries and keys have the same angles: one call rotates both.
                turned = self.rotary.turn(heads[:, :num_turned], step)
                q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
            cache.store(k, v, step.slots)
            k, v = cache.as_read(k, v)  # so that a prompt has the same keys whether it is computed here or found cached
            caches = cache.keys, cache.values
            out = paged_attention(q, k, v, *caches, step.on_host, self.scoring, cache.scales).flatten(1)
        if step.images is not None and step.images.mutual:
            mutual_attention(q, out, cache, step, self.scoring)
        return out

    def _with_kernels(self, qkv: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        positions, table = (step.positions, None) if self.rotary is None else self.rotary.angles(step)
        if step.chunks is None:
            kv = cache.paged(step.block_tables, step.context_lens, step.rows)
            if table is not None and suits(qkv, table, kv, self.scoring):
                return turned_attention(qkv, positions, table, kv, step.slots, self.scoring)
        rotary_and_store(qkv, positions, table, cache.keys, cache.values, step.slots, cache.scales)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        d, chunks = step.num_decodes, step.chunks
        whole = self._whole_prompts(step)
        if whole is not None:
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            k, v = cache.as_read(k, v)
            if cache.scales is None:
                return prompt_attention(q, k, v, whole, self.scoring.scale).flatten(1)
            mixed = prompt_attention(q, k, v, whole, self.scoring.scale * cache.scales.keys)
            return mixed.mul_(cache.scales.values).flatten(1)
        q = heads[:, : self.num_heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if d:
            kv = cache.paged(step.block_tables, step.context_lens[:d], step.rows[:d])
            decode_attention(q[:d], kv, self.scoring, out[:d])
        if chunks is not None:
            kv = cache.paged(step.block_tables, step.context_lens[d:], step.rows[d:])
            chunk_attention(q[chunks.first_token :], kv, chunks.cu_seqlens_q, self.scoring, out[chunks.first_token :])
        return out.flatten(1)

    def _whole_prompts(self, step: Step) -> list[int] | None:
        """The prompt lengths, if the step has nothing else and torch's own attention supports it and is faster."""
        lengths = step.chunks.whole_prompts if step.chunks is not None and step.num_decodes == 0 else None
        window = self.scoring.window
        if lengths is None or not self.is_plain or (window and max(lengths) > window):
            return None
        return lengths if step.once(_REPEATED_LENGTHS, lambda: _REPEATED_LENGTHS.are_worth_a_plan(lengths)) else None
