"""Attention of tokens that see what is behind them: those of an image in Gemma 3, those of a prompt in PaliGemma.

Everything before the group they see like any other token. Their keys and values are in the cache by now, so that each
group is one product of its queries with all keys up to its end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.kernels.kv_format import gather
from legato.kernels.paged_kv import Scoring
from legato.layers.kv_cache import LayerCache
from legato.layers.step import MutualTokens, Step


def mutual_attention(q: torch.Tensor, out: torch.Tensor, cache: LayerCache, step: Step, scoring: Scoring) -> None:
    """Overwrite what causal attention made of the step's groups. q [T, num_heads, head_dim], out [T, num_heads
    head_dim]. A window does not hide tokens of the same group."""
    assert step.images is not None and scoring.alibi_slopes is None and scoring.sinks is None
    for group in step.images.mutual:
        keys, values = (_gathered(tensor, group, step, q.dtype) for tensor in (cache.keys, cache.values))
        here = slice(group.first, group.first + group.count)
        out[here] = _attend(q[here], keys, values, _visible(group, scoring.window, q.device), scoring).flatten(1)


def _gathered(cache: torch.Tensor, group: MutualTokens, step: Step, dtype: torch.dtype) -> torch.Tensor:
    """[num_kv_heads, end, head_dim]"""

    def slots() -> torch.Tensor:
        size = cache.shape[1]
        positions = torch.arange(group.end, device=cache.device)
        return step.block_tables[group.row, positions // size].long() * size + positions % size

    found = gather(cache.flatten(0, 1), step.once(("mutual slots", group.row, group.end), slots), dtype)
    return found.transpose(0, 1)


def _visible(group: MutualTokens, window: int, device: torch.device) -> torch.Tensor | None:
    """[count, end]; None: everything is"""
    if not window or group.end <= window:
        return None
    keys = torch.arange(group.end, device=device)
    queries = torch.arange(group.start, group.start + group.count, device=device)
    return (keys >= group.begin) | (keys > queries[:, None] - window)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """[count, num_heads, head_dim]"""
    queries = q.transpose(0, 1)
    share = len(queries) // len(keys)
    keys, values = (part.repeat_interleave(share, dim=0) for part in (keys, values))
    if not scoring.soft_cap:
        mixed = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=visible, scale=scoring.scale
        )[0]
        return mixed.transpose(0, 1)
    scores = torch.matmul(queries, keys.transpose(1, 2)).float() * scoring.scale
    scores = (scores / scoring.soft_cap).tanh() * scoring.soft_cap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(values.dtype), values).transpose(0, 1)
