"""Shards behind a simulated network: they are slow, die, hang, and others take their place."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from legato.common.restarts import FIRST_DELAY, WINDOW
from legato.common.restarts import LONGEST_DELAY as LONGEST_BACKOFF
from legato.grammar.kinds import Grammar
from legato.router.monitoring.health import IDLE_CHECK_SECONDS
from legato.router.recovery import ConnectedShards
from legato.router.shards import ShardsLost
from legato.scheduling.blocks import RESERVED_BLOCKS
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import StepPlan, StepResult
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.scenario import LONGEST_DELAY, LONGEST_START, LONGEST_STEP, Scenario
from tests.simulation.shard import SimulatedShard

DIED = "the shards died (simulated)"
NO_START = "no shard answers (simulated)"

Log = Callable[..., None]


class SimulatedShards:
    """A `router.step_loop.Shards`, from its start to its end. What happens to it is decided from outside."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, shard: SimulatedShard, scenario: Scenario) -> None:
        self.shard = shard
        # Plans without a result, the oldest first, and since when the oldest is being computed.
        self.outstanding: deque[StepPlan] = deque()
        self.oldest_since = 0.0
        # A token has come since the last step that failed.
        self.is_proven = False
        self.is_alive = True
        self.was_opened = False
        self.lost_at: float | None = None  # the router may know since then
        self.killed_at: float | None = None
        self.hung_at: float | None = None
        self.grammars: set[Grammar] = set()
        self._loop = loop
        self._rng = rng
        self._rates = scenario.rates
        self._hang_timeout = scenario.hang_timeout
        self._num_stages = scenario.limits.num_stages
        self._stream: asyncio.Future[None] = loop.create_future()
        self._on_result: Callable[[StepResult], None] | None = None
        self._busy_until = 0.0
        self._last_arrival = 0.0
        self._killed = asyncio.Event()
        self._ended_at: float | None = None  # no step that ends later has a result

    @property
    def step_age(self) -> float:
        return self._loop.time() - self.oldest_since if self.outstanding else 0.0

    @property
    def is_well(self) -> bool:
        return self._ended_at is None

    @property
    def is_hung(self) -> bool:
        return self.hung_at is not None or self.step_age >= self._hang_timeout

    # ---- what the router calls -------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        assert self.was_opened, "a plan was sent before the stream was open: it would be lost"
        assert len(self.outstanding) <= self._num_stages, "too many steps are in flight"
        now = self._loop.time()
        if not self.outstanding:
            self.oldest_since = now
        self.outstanding.append(plan)
        if self._ended_at is not None:
            return
        rng, rates = self._rng, self._rates
        duration = LONGEST_STEP * (0.1 + 0.9 * rng.random())
        if rates.slow_step and rng.random() < rates.slow_step:
            duration = self._hang_timeout * (0.3 + 0.6 * rng.random())
        self._busy_until = done = max(self._busy_until, now) + duration
        self._last_arrival = max(self._last_arrival, done + LONGEST_DELAY * rng.random())
        self._loop.call_at(self._last_arrival, self._arrive, plan, done)

    async def run(self, on_result: Callable[[StepResult], None]) -> None:
        self._on_result = on_result
        self.was_opened = True
        try:
            await self._stream
        finally:
            self._on_result = None

    async def prepare(self, grammar: Grammar) -> None:
        await asyncio.sleep(LONGEST_STEP * self._rng.random())
        if not await self.healthy(self._hang_timeout):
            raise ShardsLost(DIED)
        self.grammars.add(grammar)

    async def release(self, blocks: list[int]) -> None:
        raise NotImplementedError("only IdleMemory asks for it, which is not simulated")

    async def healthy(self, timeout: float = 5.0) -> bool:
        await asyncio.sleep(LONGEST_DELAY)
        if self.is_alive and self.hung_at is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._killed.wait(), timeout)
        return self._ended_at is None

    def kill(self) -> None:
        """Allowed if they are dead or hung already, and so is ending twice."""
        assert not self.is_alive or self.is_hung, "shards that work were killed"
        self.killed_at = self._loop.time()
        self._killed.set()
        self._end()
        self.is_alive = False

    async def close(self) -> None:
        await asyncio.sleep(0)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Results that are on their way may be lost with it."""
        if self.is_alive:
            self._end()
            self.is_alive = False
            self._loop.call_later(LONGEST_DELAY * self._rng.random(), self._lose)

    def hang(self) -> None:
        """Nothing more is computed or answered, and the sockets stay open."""
        if self._ended_at is None:
            self._end()
            self.hung_at = self._loop.time()
            self._loop.call_later(self.longest_hang, self._check_killed)

    @property
    def longest_hang(self) -> float:
        """Seconds until the router must have noticed: the question of an idle router, or a step that it sends then.
        It comes later by as much as the router was stopped."""
        return min(IDLE_CHECK_SECONDS, self._hang_timeout) + 2 * self._hang_timeout + 1

    def _end(self) -> None:
        if self._ended_at is None:
            self._ended_at = self._loop.time()

    def _lose(self) -> None:
        self.lost_at = self._loop.time()
        if not self._stream.done():
            self._stream.set_exception(ShardsLost(DIED))
            self._stream.exception()  # seen, even if the stream was never opened

    def _check_killed(self) -> None:
        if self.is_alive and not self._stream.cancelled():
            if self._loop.paused_at >= (self.hung_at or 0.0):
                self.hung_at = self._loop.time()
                self._loop.call_later(self.longest_hang, self._check_killed)
            else:
                raise AssertionError(f"hung shards were not noticed for {self.longest_hang:g} s")

    def _arrive(self, plan: StepPlan, done: float) -> None:
        if self._ended_at is not None and done > self._ended_at:
            return
        if self.lost_at is not None or self._on_result is None:
            return
        assert self.outstanding.popleft() is plan
        self.oldest_since = self._loop.time()
        result = self.shard.run(plan)
        result.forward_ns = result.total_ns = round(LONGEST_STEP * 1e9 * self._rng.random())
        if result.error is not None:
            self.is_proven = False
        elif result.token_ids:
            self.is_proven = True
        self._on_result(result)


class Cluster:
    """Whoever starts the shards. Keeps its own account of what was lost and restarted."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, scenario: Scenario, log: Log) -> None:
        self._loop = loop
        self._rng = rng
        self._scenario = scenario
        self._log = log
        # Errors that shards reported, and for which requests.
        self.failed: list[tuple[int, str]] = []
        self._all: list[SimulatedShard] = []
        self._restarts: list[float] = []
        # Starts in a row that failed, before the router could send a step.
        self._num_failed = 0
        self._has_failed = False
        self.current = self._start(scenario.limits)
        self.current.is_proven = True
        self.has_shrunk = False

    @property
    def num_copied_back(self) -> int:
        return sum(shard.num_copied_back for shard in self._all)

    @property
    def is_exhausted(self) -> bool:
        """Whether one more restart is one too many."""
        since = self._loop.time() - WINDOW
        return sum(when > since for when in self._restarts) >= self._scenario.max_restarts

    async def connect(self) -> ConnectedShards:
        rng, rates, now = self._rng, self._scenario.rates, self._loop.time()
        killed_at = self.current.killed_at
        assert killed_at is not None, "others were started while the old ones live"
        assert not self.is_exhausted, "restarted more often than --max-restarts"
        self._restarts.append(killed_at)
        self._num_failed = 0 if self.current.was_opened and not self._has_failed else self._num_failed + 1
        waits = min(FIRST_DELAY * 2 ** (self._num_failed - 1), LONGEST_BACKOFF) if self._num_failed else 0.0
        assert now - killed_at >= waits - 1e-6, f"restarted after {now - killed_at:g} s instead of {waits:g} s"
        await asyncio.sleep(LONGEST_START * rng.random())
        if rates.failed_start and rng.random() < rates.failed_start:
            self._has_failed = True
            self._log("shards do not start")
            raise ShardsLost(NO_START)
        limits = self._scenario.limits
        if rates.fewer_blocks and rng.random() < rates.fewer_blocks:
            self.has_shrunk = True
            limits = replace(limits, num_blocks=rng.randint(RESERVED_BLOCKS + 2, limits.num_blocks))
        self._has_failed = False
        self.current = shards = self._start(limits)
        self._log("shards started", limits.num_blocks)
        if rates.early_death and rng.random() < rates.early_death:
            # While grammars are compiled, while the stream is opened, or in one of the first steps.
            self._loop.call_later(rng.choice((0.0, 0.0, 0.1)) * rng.random(), shards.die)
        return ConnectedShards(shards, limits, self._scenario.model_limits)  # type: ignore[arg-type]

    def _start(self, limits: SchedulerLimits) -> SimulatedShards:
        shard = SimulatedShard(limits, self._scenario.rates.steps, self._rng, self.failed)
        self._all.append(shard)
        return SimulatedShards(self._loop, self._rng, shard, self._scenario)
