"""Attention of tokens that see what is behind them: those of an image in Gemma 3, those of a prompt in PaliGemma. Also
the attention of text to images that are beside it.

Everything before their group the former see like any other token. Their keys and values are in the cache by now, so
that each group is one product of its queries with all keys up to its end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.kernels.kv_format import gather
from legato.kernels.paged_kv import Scoring
from legato.layers.kv_cache import LayerCache
from legato.layers.step import CrossImages, MutualTokens, Step


def mutual_attention(q: torch.Tensor, out: torch.Tensor, cache: LayerCache, step: Step, scoring: Scoring) -> None:
    """Overwrite what causal attention made of the step's groups. q [T, num_heads, head_dim], out [T, num_heads
    head_dim]. A window does not hide tokens of the same group."""
    assert step.images is not None and scoring.alibi_slopes is None and scoring.sinks is None
    for group in step.images.mutual:
        span = (group.row, 0, group.end)
        keys, values = _gathered(cache, span, step.block_tables, step, q.dtype)
        here = slice(group.first, group.first + group.count)
        out[here] = _attend(q[here], keys, values, _visible(group, scoring.window, q.device), scoring).flatten(1)


def cross_attention(q: torch.Tensor, cache: LayerCache, step: Step, images: CrossImages, scale: float) -> torch.Tensor:
    """q [T, num_heads, head_dim] -> [T, num_heads head_dim]; zeros for tokens that see no image."""
    out = torch.zeros(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for group in images.groups:
        span = (group.row, group.begin, group.end)
        keys, values = _gathered(cache, span, images.block_tables, step, q.dtype)
        here = slice(group.first, group.first + group.count)
        out[here] = _attend(q[here], keys, values, None, Scoring(scale)).flatten(1)
    return out


def _gathered(
    cache: LayerCache, span: tuple[int, int, int], tables: torch.Tensor, step: Step, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_kv_heads, end - begin, head_dim] of a row from `begin` to `end`."""
    row, begin, end = span

    def slots() -> torch.Tensor:
        size = cache.keys.shape[1]
        positions = torch.arange(begin, end, device=tables.device)
        return tables[row, positions // size].long() * size + positions % size

    where = step.once(("slots of a span", *span), slots)
    keys, values = (gather(part.flatten(0, 1), where, dtype).transpose(0, 1) for part in (cache.keys, cache.values))
    return (keys, values) if cache.scales is None else (keys * cache.scales.keys, values * cache.scales.values)


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
