"""The client processes that generate the load: they start together and report their measurements.

Closed loop: every slot sends its next request when its last one is answered. Open loop: requests are sent when they
are due, however many are in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from legato.benchmark.report import num_cores
from legato.benchmark.serve.client import LoadClient, Record
from legato.benchmark.serve.work import LoadLevel, RequestSource, Target
from legato.common.errors import LegatoError

# Seconds for the start signal to reach all processes.
HEAD_START = 0.05
REPORT_SECONDS = 0.25
MAX_PROCESSES = 8
# Streams that one process reads at full speed, by experience.
STREAMS_PER_PROCESS = 64


class LoadFailed(LegatoError):
    """A client process ended by itself."""


@dataclass(frozen=True)
class Assignment:
    """What process `number` of `num_processes` does."""

    target: Target
    source: RequestSource
    level: LoadLevel
    number: int
    num_processes: int

    def slots(self) -> list[Iterator[int]]:
        """The request numbers of each of our slots. Slots are dealt out in turn, so that all processes have as many."""
        assert self.level.concurrency is not None
        count, last = self.level.concurrency, self.level.num_requests
        return [
            iter(range(slot, last, count)) if last is not None else itertools.count(slot, count)
            for slot in range(self.number, count, self.num_processes)
        ]

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """Our share of the arrivals: number of the request, and seconds after the start."""
        everybody = zip(self.level.numbers(), self.level.arrivals(self.source.seed), strict=False)
        return itertools.islice(everybody, self.number, None, self.num_processes)


@dataclass(frozen=True)
class LoadReport:
    """What is new since the last report. The first says that the process is ready, the last one has `cpu_share`: near
    1 the process could not keep up, and the figures are those of the client."""

    records: list[Record] = field(default_factory=list)
    num_open: int = 0
    num_tokens: int = 0
    cpu_share: float | None = None


@dataclass
class LevelRun:
    """One level: its state while it runs, and then all that was measured."""

    level: LoadLevel
    started: float = 0.0
    records: list[Record] = field(default_factory=list)
    # By process: requests in flight and tokens received.
    num_open: dict[int, int] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    cpu_shares: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Until now."""
        return max(0.0, time.perf_counter() - self.started) if self.started else 0.0

    @property
    def share(self) -> float:
        """How much is done: of the requests or of the time, whichever ends sooner."""
        level = self.level
        shares = [len(self.records) / level.num_requests] if level.num_requests else []
        shares += [self.seconds / level.duration] if level.duration else []
        return min(1.0, max(shares, default=0.0))


def num_processes(level: LoadLevel, wanted: int | None) -> int:
    """By default up to half of the cores, because the server may need the others; never more than streams."""
    usual = min(max(1, num_cores() // 2), MAX_PROCESSES)
    if level.concurrency is None:
        return wanted or usual
    return min(wanted or min(usual, -(-level.concurrency // STREAMS_PER_PROCESS)), level.concurrency)


def run_level(
    target: Target, source: RequestSource, run: LevelRun, processes: int, on_report: Callable[[LevelRun], None]
) -> None:
    """Run one level to its end, into `run`. No process is left running, whatever happens."""
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for number in range(processes):
            pipe, process = _start(Assignment(target, source, run.level, number, processes))
            workers[pipe] = process
        for pipe, process in workers.items():
            _receive(pipe, process)  # ready
        run.started = time.perf_counter() + HEAD_START
        for pipe in workers:
            pipe.send(run.started)
        busy = dict(zip(workers, range(processes), strict=True))
        while busy:
            for pipe in cast(list[Connection], wait(list(busy))):
                report, number = _receive(pipe, workers[pipe]), busy[pipe]
                run.records += report.records
                run.num_open[number], run.num_tokens[number] = report.num_open, report.num_tokens
                if report.cpu_share is not None:
                    run.cpu_shares.append(report.cpu_share)
                    del busy[pipe]
                on_report(run)
    finally:
        for process in workers.values():
            process.kill()
            process.join()


def _start(assignment: Assignment) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(assignment, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _receive(pipe: Connection, process: SpawnProcess) -> LoadReport:
    try:
        report: LoadReport = pipe.recv()
        return report
    except (EOFError, ConnectionError):
        process.join()
        raise LoadFailed(f"a client process ended with code {process.exitcode}") from None


# ---- in a client process --------------------------------------------------------------------------------------------


def _work(assignment: Assignment, pipe: Connection) -> None:
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the command decides
    try:
        pipe.send(LoadReport())
        started: float = pipe.recv()  # by perf_counter, which is the same in all processes of a machine
    except (EOFError, ConnectionError):
        return  # the command was killed

    async def run() -> None:
        await LoadGenerator(assignment, pipe, started).run()

    uvloop.run(run())


class LoadGenerator:
    def __init__(self, assignment: Assignment, pipe: Connection, started: float) -> None:
        self._assignment = assignment
        self._pipe = pipe
        self._client = LoadClient(assignment.target, started)
        self._started = started
        self._records: list[Record] = []

    async def run(self) -> None:
        reporting = asyncio.ensure_future(self._keep_reporting())
        await asyncio.sleep(self._started - time.perf_counter())
        cpu, wall = time.process_time(), time.perf_counter()
        await (self._closed_loop() if self._assignment.level.rate is None else self._open_loop())
        share = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)
        reporting.cancel()
        self._report(share)
        self._client.close()

    async def _closed_loop(self) -> None:
        await asyncio.gather(*(self._slot(numbers) for numbers in self._assignment.slots()))

    async def _slot(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if self._is_over(time.perf_counter() - self._started):
                return
            await self._send(number, time.perf_counter())

    async def _open_loop(self) -> None:
        """Latency counts from when a request was due, so that it includes the time that we were late with sending."""
        async with asyncio.TaskGroup() as requests:
            for number, moment in self._assignment.arrivals():
                if self._is_over(moment):
                    break
                due = self._started + moment
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                requests.create_task(self._send(number, due))

    async def _send(self, number: int, due: float) -> None:
        record = await self._client.send(self._assignment.source.request(number), due)
        self._records.append(record)  # looked up after the await: a report replaces the list

    def _is_over(self, moment: float) -> bool:
        """Whether to stop sending; requests in flight are completed."""
        duration = self._assignment.level.duration
        return duration is not None and moment >= duration

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()

    def _report(self, cpu_share: float | None = None) -> None:
        records, self._records = self._records, []
        try:
            self._pipe.send(LoadReport(records, self._client.num_open, self._client.num_tokens, cpu_share))
        except ConnectionError:
            os._exit(1)  # the command was killed
