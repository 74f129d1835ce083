"""Chooses the replica with the lowest cost for a request. Pure functions, no I/O.

The cost of a replica is what it would have to compute before and beside the request, in tokens:

    prompt tokens that are not in its cache
    + prompt tokens that wait there already, as far as they are not in its cache either
    + DECODE_COST for each request that runs or waits there
    + QUEUE_COST for each request more than it has rows for

A cached prefix is worth its tokens and no more, so that a replica with a popular prefix fills up only until computing
the prefix elsewhere is cheaper than waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A decode takes a place in every step: about what this many prompt tokens take of a step once.
DECODE_COST = 32
# Who waits for a row waits for an answer to end.
QUEUE_COST = 2048
# Rows of a replica that does not say how many it has.
DEFAULT_ROWS = 128
# Share of the KV cache below which a replica soon preempts; there a request costs as in the queue.
LOW_MEMORY = 0.05


@dataclass(slots=True)
class Load:
    """Of one replica. Not frozen: one is made for every replica and request, and that takes twice as long."""

    # Requests that run or wait, ours and those of others.
    num_requests: int = 0
    # Prompt tokens to compute, of requests that have not got their first token.
    pending_tokens: int = 0
    max_rows: int = DEFAULT_ROWS
    # Share of the KV blocks that no request uses.
    free_share: float = 1.0


def cost(load: Load, prompt_tokens: int, cached_tokens: int) -> int:
    num, new = load.num_requests, prompt_tokens - cached_tokens
    found = load.pending_tokens + DECODE_COST * num + (new if new > 0 else 0)
    if num >= load.max_rows:
        found += QUEUE_COST * (num + 1 - load.max_rows)
    if load.free_share < LOW_MEMORY and num:
        found += QUEUE_COST
    return found


def cheapest(loads: Sequence[Load], prompt_tokens: int, cached_tokens: Sequence[int], first: int = 0) -> int:
    """The index of the cheapest; among equals the first one from `first` on, so that they take turns."""
    costs = [cost(load, prompt_tokens, cached) for load, cached in zip(loads, cached_tokens, strict=True)]
    least = min(costs)
    try:
        return costs.index(least, first)
    except ValueError:
        return costs.index(least)
