"""Causal attention of whole prompts, whose keys and values are all in this step: no cache to read.

On NVIDIA GPUs cuDNN does this faster than any kernel of ours. It wants a rectangle, so neighbouring prompts of equal
length go together and each other length is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def prompt_attention(
    q: Tensor,  # [T, num_heads, head_dim]; all three may be views into the packed projection
    k: Tensor,  # [T, num_kv_heads, head_dim]
    v: Tensor,
    lengths: Sequence[int],  # of the prompts, on the host: they shape the calls
    scale: float,
) -> Tensor:
    assert sum(lengths) == q.shape[0] == k.shape[0] == v.shape[0], (lengths, q.shape, k.shape)
    parts, first = [], 0
    for length, run in groupby(lengths):
        last = first + length * len(list(run))
        parts.append(_attend(q[first:last], k[first:last], v[first:last], length, scale))
        first = last
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def num_calls(lengths: Sequence[int]) -> int:
    """How many runs of equal lengths there are."""
    return sum(1 for _ in groupby(lengths))


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    queries, keys, values = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)
