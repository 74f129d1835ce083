"""One seed: its scenario, its faults and its clients around a real router, from the first request to the last."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from legato.common.restarts import RestartBudget
from legato.ipc import messages as msg
from legato.router.monitoring.health import BEAT_SECONDS, HealthMonitor
from legato.router.recovery import Recovery
from legato.router.running import IDS_PER_WORKER, LAST_WORDS
from legato.router.shards import ShardsLost
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import Output
from legato.telemetry.metrics import StepFigures
from tests.simulation.clients import Client, draw_request
from tests.simulation.event_loop import TURN, SimulatedLoop
from tests.simulation.invariants import CheckedStepLoop, check_everything, check_totals, reasons_to_refuse
from tests.simulation.scenario import LONGEST_PAUSE, LONGEST_START, LONGEST_STEP, draw
from tests.simulation.shards import Cluster
from tests.simulation.workers import SimulatedWorker, SimulatedWorkers

SHUTTING_DOWN = "the server is shutting down"
# Every so many steps everything is checked, one by one.
FULL_CHECK = 61
# More steps than any seed needs: a simulation that runs on and on is a bug, too.
MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Report:
    num_steps: int
    num_events: int
    num_requests: int
    num_restarts: int
    num_preemptions: int
    num_drafts: int  # that were right, and were told to a client
    num_copied_back: int  # blocks, from host memory
    # Of every token, error, time and fault: two runs of a seed are the same if these are.
    digest: int


class SimulationFailed(AssertionError):
    def __init__(self, seed: int, problem: BaseException, trace: list[str]) -> None:
        self.seed = seed
        what = f"{type(problem).__name__}: {problem}" if str(problem) else repr(problem)
        lines = [f"seed {seed} failed: {what}", *("    " + line for line in trace)]
        super().__init__("\n".join([*lines, f"replay it: python -m tests.simulation --seed {seed} --trace"]))


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> Report:
    """SimulationFailed if anything is not as it must be. `trace` hears of everything but tokens."""
    with _quiet():
        world = World(seed, trace)
        try:
            report = world.run()
            world.close()
        except Exception as problem:
            lines = list(world.trace)
            with suppress(Exception):
                world.close()
            raise SimulationFailed(seed, problem, lines) from problem
        return report


class World:
    def __init__(self, seed: int, listener: Callable[[str], None] | None = None) -> None:
        self.trace: deque[str] = deque(maxlen=30)
        self._listener = listener
        self._digest = seed
        self._rng = rng = random.Random(seed)
        self._scenario = scenario = draw(rng)
        self._loop = loop = SimulatedLoop()  # type: ignore[abstract]  # what sockets and processes need is missing
        self._lateness = 0.0
        self._num_steps = self._num_drafts = 0
        self._num_restarts = 0
        self._num_to_come = scenario.num_requests
        self._clients: dict[int, Client] = {}
        self._waiting: set[int] = set()
        self._lost: str | None = None
        self._is_stopping = False
        self._num_workers = 0
        self._log("scenario", scenario)
        self._cluster = Cluster(loop, rng, scenario, self._log)
        self._scheduler = Scheduler(scenario.limits)
        self._steps = CheckedStepLoop(
            self._scheduler, self._cluster.current, scenario.model_limits, self._on_step, loop, scenario.hang_timeout
        )
        self._steps.clients = self._clients
        self._workers = SimulatedWorkers(self._check_state)
        budget = RestartBudget(scenario.max_restarts)
        self._recovery = Recovery(self._steps, self._cluster.current, self._cluster.connect, budget)  # type: ignore[arg-type]
        self._health = HealthMonitor(self._steps, self._workers, scenario.hang_timeout, loop)  # type: ignore[arg-type]
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the course of events --------------------------------------------------------------------------------------

    def run(self) -> Report:
        loop, scenario = self._loop, self._scenario
        loop.call_soon(self._start)
        loop.run_while(lambda: self._num_to_come > 0)
        self._log("faults stop")
        scenario.rates.stop()
        end = loop.time() + self._longest_rest()
        loop.run_while(lambda: bool(self._waiting) and loop.time() < end)
        assert not self._waiting, f"requests {sorted(self._waiting)[:5]} do not end in {self._longest_rest():.0f} s"
        self._settle()
        self._check_end()
        stats = self._scheduler.stats
        return Report(
            self._num_steps,
            loop.num_events,
            len(self._clients),
            self._num_restarts,
            stats.preemptions,
            self._num_drafts,
            self._cluster.num_copied_back,
            self._digest,
        )

    def close(self) -> None:
        """SIGTERM without grace, so that no task outlives its loop."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        end = self._loop.time() + 1
        self._loop.run_while(lambda: self._loop.time() < end and not all(task.done() for task in self._tasks))
        self._loop.drop()

    def _start(self) -> None:
        rates, loop = self._scenario.rates, self._loop
        self._tasks = [loop.create_task(self._steps.run(self._recover)), loop.create_task(self._health.run())]
        self._tasks[0].add_done_callback(self._on_lost)
        for _ in range(self._scenario.num_workers):
            loop.call_soon(self._add_worker)
        loop.call_later(0.01, self._arrive)
        self._repeat(lambda: rates.death, self._kill_shards)
        self._repeat(lambda: rates.hang, self._hang_shards)
        self._repeat(lambda: rates.disconnect, self._disconnect)
        self._repeat(lambda: rates.pause, self._pause)
        if self._scenario.grace is not None:
            duration = self._scenario.gap * self._scenario.num_requests
            loop.call_later(duration * self._rng.random(), self._terminate, self._scenario.grace)

    def _repeat(self, rate: Callable[[], float], fault: Callable[[], None]) -> None:
        def happen() -> None:
            if rate():
                fault()
                self._loop.call_later(self._rng.expovariate(rate()), happen)

        if rate():
            self._loop.call_later(self._rng.expovariate(rate()), happen)

    def _longest_rest(self) -> float:
        """Seconds in which every request must end once there are no more faults: the shards may hang, be killed, start
        and fail to start for the last time; then each request may have to wait for all others and be preempted."""
        hang_timeout, limits = self._scenario.hang_timeout, self._scenario.limits
        lengths = sum(len(each.request.input_ids) + each.request.max_new_tokens for each in self._clients.values())
        per_second = LONGEST_STEP * (2 if limits.max_prompt_tokens is None else 4)
        return 4 * hang_timeout + 60 + 2 * LONGEST_START + LONGEST_PAUSE + lengths * per_second

    def _settle(self) -> None:
        """Shards that were lost last, or hang now that they have no work, are replaced and prove that they compute."""
        if self._rng.random() < 0.3:
            self._hang_shards()

        def is_well() -> bool:
            return self._lost is not None or (self._steps.is_healthy and self._cluster.current.is_well)

        if not self._is_stopping:
            end = self._loop.time() + self._longest_rest()
            self._loop.run_while(lambda: not is_well() and self._loop.time() < end)
            assert is_well(), "not healthy again after the last fault"
        end = self._loop.time() + 2 * BEAT_SECONDS + 1
        self._loop.run_while(lambda: self._loop.time() < end)

    # ---- clients and workers ---------------------------------------------------------------------------------------

    def _add_worker(self) -> None:
        if self._is_stopping:
            return
        first_id = self._num_workers * IDS_PER_WORKER + 1
        self._num_workers += 1
        rates = self._scenario.rates
        worker = SimulatedWorker(
            self._loop, self._rng, rates, self._steps, first_id, self._on_submitted, self._on_message
        )
        self._workers.all.append(worker)

    def _arrive(self) -> None:
        rng, scenario = self._rng, self._scenario
        present = [worker for worker in self._workers.all if not worker.is_gone]
        for _ in range(rng.randint(1, scenario.burst)):
            self._num_to_come -= 1
            if present and not self._is_stopping:
                self._submit(rng.choice(present))
        if self._num_to_come > 0:
            self._loop.call_later(rng.expovariate(1 / scenario.gap), self._arrive)

    def _submit(self, worker: SimulatedWorker) -> None:
        rng = self._rng
        request = draw_request(rng, worker.next_id, self._scenario)
        worker.next_id += 1
        client = self._clients[request.id] = Client(request, self._scenario)
        self._waiting.add(request.id)
        client.on_end = self._waiting.discard
        if rng.random() < self._scenario.rates.cancel:
            if rng.random() < 0.5:
                client.cancel_after = rng.randint(1, 10)
            else:
                self._loop.call_later(rng.random(), worker.cancel, client)
        worker.submit(client)

    def _on_submitted(self, client: Client) -> None:
        client.submitted_at = self._loop.time()
        if client.request.id not in self._scheduler._entries:
            client.explained |= reasons_to_refuse(client.request, self._scheduler)

    def _on_message(self, worker: SimulatedWorker, tokens: msg.Tokens) -> None:
        """The router sends outputs: no request has any after its last, and none that is gone has any."""
        now = self._loop.time()
        for request_id in tokens.request_ids:
            assert request_id not in worker.ended, f"request {request_id} has an output after its last"
            assert worker.cancelled.get(request_id, now) >= now - 3 * TURN, f"request {request_id} was cancelled"
        self._digest = hash((self._digest, now, *tokens.request_ids, *tokens.token_ids))
        for place, output in tokens.rest:
            self._num_drafts += output.is_draft
            if output.error is not None or output.finish_reason is not None:
                request_id = tokens.request_ids[place]
                assert request_id not in worker.ended, f"request {request_id} ends twice"
                worker.ended.add(request_id)
                if output.error is not None:
                    self._check_error(worker.clients[request_id], output)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _kill_shards(self) -> None:
        self._log("shards die")
        self._cluster.current.die()

    def _hang_shards(self) -> None:
        self._log("shards hang")
        self._cluster.current.hang()

    def _disconnect(self) -> None:
        present = [worker for worker in self._workers.all if not worker.is_gone]
        if present:
            self._log("a worker dies")
            worker = self._rng.choice(present)
            worker.leave()
            self._workers.all.remove(worker)
            self._loop.call_later(self._rng.random(), self._add_worker)

    def _pause(self) -> None:
        seconds = LONGEST_PAUSE * self._rng.random() ** 3
        self._log("the router is stopped", seconds)
        self._lateness = max(self._lateness, seconds)
        self._loop.pause(seconds)

    def _terminate(self, grace: float) -> None:
        """What `RouterProcess` does at SIGTERM."""
        self._log("SIGTERM", grace)
        self._is_stopping = True
        self._health.drain()
        self._loop.call_later(grace, self._tasks[0].cancel)

    async def _recover(self, error: ShardsLost) -> None:
        self._log("shards lost", error)
        if self._is_stopping:
            raise error
        self._steps.lost_shards = self._cluster.current
        await self._recovery(error)
        self._num_restarts += 1

    def _on_lost(self, task: asyncio.Task[None]) -> None:
        """The step loop has ended: because the server stops, or because it has no more restarts."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ShardsLost):
            raise error
        self._lost = SHUTTING_DOWN if error is None else str(error)
        self._log("the router ends", self._lost)
        assert self._is_stopping or self._cluster.is_exhausted, "gave up before --max-restarts"
        self._loop.call_later(LAST_WORDS, self._check_told)

    def _check_told(self) -> None:
        """Workers are killed `LAST_WORDS` seconds after the end: whoever has no answer by then gets none. A router that
        was stopped meanwhile has had no time to answer."""
        if self._loop.time() - self._loop.paused_at < LAST_WORDS:
            self._loop.call_later(LAST_WORDS, self._check_told)
            return
        for worker in self._workers.all:
            assert not worker.port._requests, "requests were not told of the end"
            assert not worker.port._tasks, "grammars are still compiled after the end"

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _on_step(self, figures: StepFigures) -> None:
        self._num_steps += 1
        assert self._num_steps < MOST_STEPS, "steps without an end"
        check_totals(self._scheduler)
        if self._num_steps % FULL_CHECK == 0:
            self._check_fully()

    def _check_fully(self) -> None:
        if self._steps._lost is not None:  # the scheduler ends with its process
            return
        check_everything(self._scheduler, self._loop.time(), self._lateness + LONGEST_STEP)
        for request_id in self._scheduler._entries.keys() & self._clients.keys():
            assert not self._clients[request_id].is_cancelled, f"request {request_id} was cancelled and goes on"

    def _check_state(self, state: msg.ServerState) -> None:
        """Liveness is true exactly while steps advance, and health while tokens come. Told every second, also while
        there are no steps."""
        self._check_fully()
        shards = self._cluster.current
        is_changing = shards.lost_at is not None or shards.killed_at is not None or not shards.was_opened
        if self._steps._lost is not None or state.restarting:
            assert not state.healthy and not state.ready
            assert self._steps._lost or is_changing or shards.is_hung or not shards.is_well, (
                "restarting while the shards are well"
            )
            return
        if is_changing:  # the router will know in this turn or the next
            return
        age, hang_timeout = shards.step_age, self._scenario.hang_timeout
        if self._lateness == 0:
            assert abs(state.step_age - age) < 1e-6, f"the age of the oldest step is {state.step_age:g}, not {age:g}"
            assert state.live == (age < hang_timeout), "live without steps, or steps without being live"
            assert not state.healthy or shards.is_proven, "healthy without a token from these shards"
        assert state.step_age <= hang_timeout + self._lateness + 1, "a hung step is not noticed"
        assert not (state.ready and self._is_stopping), "ready while draining"

    def _check_error(self, client: Client, output: Output) -> None:
        for request_id, error in self._cluster.failed:
            if request_id in self._clients:
                self._clients[request_id].explained.add(error)
        self._cluster.failed.clear()
        self._log("error", client.request.id, output.error)
        client.check_error(output, self._loop.time(), self._cluster.has_shrunk, self._steps._lost)

    def _check_end(self) -> None:
        """Nothing is left of any request."""
        for client in self._clients.values():
            assert not client.is_waiting
        for worker in self._workers.all:
            assert not worker.port._requests and not worker.port._tasks, "a port remembers requests that have ended"
            assert not worker.scheduler._receivers and not worker.scheduler._questions
        assert not self._steps._receivers, "the step loop remembers requests that have ended"
        if self._lost is None:
            self._check_fully()
            assert not self._scheduler._entries, "the scheduler remembers requests that have ended"
            assert self._scheduler.next_deadline() is None
            assert self._scheduler.kv_usage == 0, "blocks are in use without requests"

    def _log(self, *words: object) -> None:
        self._digest = hash((self._digest, self._loop.time()))
        line = f"{self._loop.time():10.3f} s, step {self._num_steps}: " + " ".join(map(str, words))
        self.trace.append(line)
        if self._listener is not None:
            self._listener(line)


@contextmanager
def _quiet() -> Iterator[None]:
    """The router logs every loss as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
