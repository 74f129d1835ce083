"""Causal attention of whole prompts, whose keys and values are all in this step: no cache to read.

On NVIDIA GPUs cuDNN does this faster than any kernel of ours, once it has a plan for the lengths (`RepeatedLengths`).
It wants a rectangle, so neighbouring prompts of equal length go together and each other length is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

# Tokens. Attention is a small part of a step of shorter prompts, whichever kernel computes it.
LONG = 1024
# Prompts of many different lengths would be many calls, and then one launch of our own kernel is sooner done.
MOST_CALLS = 2
# How often lengths must have come before they are expected again, and how many of them are remembered.
OFTEN, REMEMBERED = 6, 64


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


class RepeatedLengths:
    """Which steps are worth a call of cuDNN. It makes a plan for lengths that it has not met, which takes as long as
    five full steps of an 8B model on an H200: so only for lengths that keep coming."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], int] = {}

    def are_worth_a_plan(self, lengths: Sequence[int]) -> bool:
        """To be asked once a step."""
        if min(lengths) < LONG or sum(1 for _ in groupby(lengths)) > MOST_CALLS:
            return False
        key = tuple(lengths)
        times = self._counts.pop(key, 0)
        self._counts[key] = times + 1
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]  # what has not come for the longest time
        return times >= OFTEN


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    queries, keys, values = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    params = SDPAParams(queries, keys, values, None, 0.0, True, True)
    # Not by priority: to set it once replaces torch's own choice of a backend for the rest of the process.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda and can_use_cudnn_attention(params) else nullcontext():
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)
