"""The data of GET /dashboard, collected from the scheduler process on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice, pairwise

import msgspec

from legato.api.dashboard import BlockUse, DashboardData, Distribution, RecentStep, RunningRow, WaitingRow
from legato.router.step_loop import StepLoop
from legato.scheduling.entry import Entry
from legato.scheduling.scheduler import Scheduler
from legato.telemetry.catalogue import FAILURES, FIRST_TOKEN_BUCKETS, GAP_BUCKETS, RESTARTED
from legato.telemetry.metrics import Figures, Metrics, StepFigures, add_up

MAX_STEPS = 240
MAX_LISTED = 256

_encode = msgspec.json.Encoder().encode


class StepHistory:
    """The last steps, one tuple each, so that recording costs almost nothing."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, StepFigures]] = deque(maxlen=MAX_STEPS)
        self._numbers = count(1)

    def add(self, step: StepFigures) -> None:
        self._steps.append((next(self._numbers), step))

    def recent(self) -> list[RecentStep]:
        return [
            RecentStep(
                number=number,
                total_time=step.inference_time,
                forward_time=step.forward_time,
                planning_time=step.planning_time,
                prompt_tokens=step.num_computed - step.num_gaps,
                decodes=step.num_gaps,
                admitted=step.num_admitted,
                preempted=step.num_preempted,
                failed=step.failed,
            )
            for number, step in self._steps
        ]


class Dashboard:
    def __init__(
        self,
        steps: StepLoop,
        metrics: Metrics,
        worker_figures: Callable[[], Awaitable[Figures]],
        history: StepHistory,
        model_id: str,
    ) -> None:
        self._steps = steps
        self._metrics = metrics
        self._worker_figures = worker_figures
        self._history = history
        self._model_id = model_id

    async def render(self) -> bytes:
        """As JSON."""
        figures = add_up([await self._worker_figures(), self._metrics.figures()])
        return _encode(self._data(figures))

    def _data(self, figures: Figures) -> DashboardData:
        steps, scheduler, now = self._steps, self._steps.scheduler, self._steps.now()
        waiting = sorted(scheduler.waiting(), key=lambda entry: entry.queued_at)

        def total(name: str, sample: str = "") -> int:
            return int(figures.get(name, {}).get(name + sample, 0))

        return DashboardData(
            time=time.time(),
            model_id=self._model_id,
            healthy=steps.is_healthy,
            restarting=steps.is_restarting,
            max_rows=scheduler.limits.max_rows,
            num_running=len(scheduler.running),
            num_waiting=len(waiting),
            oldest_waiting=steps.queue_age,
            running=[running_row(entry, now) for entry in islice(scheduler.running, MAX_LISTED)],
            waiting=[
                waiting_row(entry, scheduler, now, restarting=steps.is_restarting)
                for entry in islice(waiting, MAX_LISTED)
            ],
            blocks=block_use(scheduler),
            steps=self._history.recent(),
            generated_tokens=total("legato_generated_tokens"),
            prompt_tokens=total("legato_prompt_tokens"),
            cached_tokens=total("legato_prefix_hit_tokens"),
            preemptions=total("legato_preemptions"),
            requests=total("tgi_request_count"),
            successes=total("tgi_request_success"),
            failures={err: total("tgi_request_failure", f'{{err="{err}"}}') for err in FAILURES},
            restarts={name: total("legato_restarts", f'{{process="{name}"}}') for name in RESTARTED},
            replayed_requests=total("legato_replayed_requests"),
            time_to_first_token=distribution(figures, "legato_time_to_first_token_seconds", FIRST_TOKEN_BUCKETS),
            inter_token=distribution(figures, "legato_inter_token_seconds", GAP_BUCKETS),
        )


def running_row(entry: Entry, now: float) -> RunningRow:
    return RunningRow(
        id=entry.id,
        state="decode" if entry.num_generated and entry.num_to_compute <= 1 else "prompt",
        prompt_tokens=entry.num_prompt,
        computed_tokens=entry.num_scheduled,
        generated_tokens=entry.num_generated,
        max_new_tokens=entry.request.max_new_tokens,
        cached_tokens=entry.num_cached,
        blocks=len(entry.blocks),
        age=now - entry.queued_at,
        priority=entry.priority,
    )


def waiting_row(entry: Entry, scheduler: Scheduler, now: float, *, restarting: bool) -> WaitingRow:
    return WaitingRow(
        id=entry.id,
        prompt_tokens=entry.num_prompt,
        age=now - entry.queued_at,
        priority=entry.priority,
        reason=waiting_reason(entry, scheduler, restarting=restarting),
    )


def waiting_reason(entry: Entry, scheduler: Scheduler, *, restarting: bool) -> str:
    """What keeps a request from being admitted, the most lasting cause first."""
    limits = scheduler.limits
    if restarting:
        return "the shards are being restarted"
    preempted = "preempted; " if entry.epoch else ""
    if len(scheduler.running) >= limits.max_rows:
        return f"{preempted}all {limits.max_rows} rows are in use (--max-batch-size)"
    needed = -(-len(entry.tokens) // limits.block_size) + len(scheduler.running)
    available = scheduler.pool.available + scheduler.tree.num_evictable
    if needed > available:
        return f"{preempted}needs up to {needed} KV blocks, {available} are available"
    return f"{preempted}waits for room in a step, or for a prefix that another request computes"


def block_use(scheduler: Scheduler) -> BlockUse:
    pool, cached = scheduler.pool, scheduler.tree.num_evictable
    return BlockUse(
        block_size=scheduler.limits.block_size,
        total=pool.total,
        running=pool.total - pool.available - cached,
        cached=cached,
        free=pool.available,
    )


def distribution(figures: Figures, name: str, bounds: Sequence[float]) -> Distribution:
    found = figures.get(name, {})
    labels = [*map(repr, bounds), "+Inf"]
    cumulative = [0, *(int(found.get(f'{name}_bucket{{le="{label}"}}', 0)) for label in labels)]
    return Distribution(bounds=list(bounds), counts=[after - before for before, after in pairwise(cumulative)])
