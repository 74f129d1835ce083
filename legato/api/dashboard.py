"""Response of GET /dashboard/data: the running batch, and why requests are queued. No text, no keys."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class RunningRow(Struct, kw_only=True):
    """A request that has a row."""

    id: int
    state: Literal["prompt", "decode"]
    prompt_tokens: int
    # Of prompt and generated text together.
    computed_tokens: int
    generated_tokens: int
    max_new_tokens: int
    cached_tokens: int
    blocks: int
    # Seconds since it came.
    age: float
    priority: int


class WaitingRow(Struct, kw_only=True):
    """A request in the queue."""

    id: int
    prompt_tokens: int
    age: float
    priority: int
    reason: str


class BlockUse(Struct, kw_only=True):
    """KV cache blocks: used by running requests, only in the prefix cache, and free."""

    block_size: int
    total: int
    running: int
    cached: int
    free: int


class RecentStep(Struct, kw_only=True, array_like=False):
    """Times in seconds."""

    number: int
    total_time: float
    forward_time: float
    planning_time: float
    prompt_tokens: int
    decodes: int
    admitted: int
    preempted: int
    failed: bool


class Distribution(Struct, kw_only=True):
    """How many values were at most as large as each bound, and larger than the one before; the last is larger than all
    bounds. Counts only grow: the difference of two answers is what happened in between."""

    bounds: list[float]
    counts: list[int]


class DashboardData(Struct, kw_only=True):
    # Seconds since 1970.
    time: float
    model_id: str
    healthy: bool
    restarting: bool
    max_rows: int
    # Numbers of requests; the lists have the first of them.
    num_running: int
    num_waiting: int
    oldest_waiting: float
    running: list[RunningRow]
    waiting: list[WaitingRow]
    blocks: BlockUse
    # The last ones, oldest first.
    steps: list[RecentStep]
    # Counters since the start.
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    requests: int
    successes: int
    failures: dict[str, int]
    restarts: dict[str, int]
    replayed_requests: int
    time_to_first_token: Distribution
    inter_token: Distribution
