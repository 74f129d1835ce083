"""Computes the number of replicas from their queues and the use of their KV caches and rows.

Queues say that requests wait now, use says that they will soon. Both are shared by all replicas, so the number that is
wanted is the sum over the replicas divided by what each should have; whichever is more counts. Ray asks once a second,
and acts when the answer was the same for `--scale-up-delay` or `--scale-down-delay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from legato.ipc.routed import ReplicaState

QUEUE, USE = "queue", "use"
# What is less than this of a replica is no reason for another: averages of samples are never exact.
TOLERANCE = 0.05


def measured(state: ReplicaState) -> dict[str, float]:
    """What a replica tells Ray of itself."""
    memory = 1 - state.free_blocks / max(1, state.total_blocks)
    return {QUEUE: float(state.queued), USE: max(memory, min(1.0, state.running / max(1, state.max_rows)))}


def wanted(queues: Iterable[float], uses: Iterable[float], target_queue: float, target_use: float) -> int:
    """Not less than one."""
    by_queue = sum(queues) / target_queue
    by_use = sum(uses) / target_use
    return max(1, math.ceil(max(by_queue, by_use) - TOLERANCE))


class QueueAndUsePolicy:
    """Ray Serve's autoscaling policy. Ray applies bounds and delays."""

    def __init__(self, target_queue: float, target_use: float) -> None:
        self._target_queue = target_queue
        self._target_use = target_use

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        queues, uses = found.get(QUEUE, {}), found.get(USE, {})
        if not uses or len(uses) < context.current_num_replicas:  # one has just started and has not said anything
            return context.target_num_replicas, {}
        return wanted(queues.values(), uses.values(), self._target_queue, self._target_use), {}
