"""The processes that make the load, seen from the command: start them together, collect what they report."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from legato.benchmark.serve.client import Record
from legato.benchmark.serve.work import Level, Target, Work
from legato.benchmark.serve.worker import Assignment, Finished, Progress, Ready, Report, Start
from legato.common.errors import LegatoError

# Time for the word to reach all of them.
HEAD_START = 0.05
MOST_PROCESSES = 8
# Streams that one process can read at full speed, by experience.
STREAMS_PER_PROCESS = 64


class LoadFailed(LegatoError):
    """A process that made the load has ended by itself."""


@dataclass
class Counts:
    """One level while it runs, and at its end everything there is to know of it."""

    level: Level
    started: float = 0.0
    records: list[Record] = field(default_factory=list)
    # By process: requests that are out, tokens that came, and at the end how busy it was.
    num_open: dict[int, int] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    cpu_shares: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Until now."""
        return max(0.0, time.perf_counter() - self.started) if self.started else 0.0


def num_processes(level: Level, wanted: int | None) -> int:
    """Half of the cores, for the server may well have the others; and no more than there are streams to share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usual = min(max(1, cores // 2), MOST_PROCESSES)
    if level.concurrency is None:
        return wanted or usual
    return min(wanted or min(usual, -(-level.concurrency // STREAMS_PER_PROCESS)), level.concurrency)


async def press(
    target: Target, work: Work, level: Level, processes: int, counts: Counts, on_progress: Callable[[Counts], None]
) -> None:
    """Run one level to its end, into `counts`. Whatever happens, no process is left behind."""
    workers = await asyncio.gather(*(_spawn() for _ in range(processes)))
    try:
        for number, worker in enumerate(workers):
            _write(worker, Assignment(target, work, level, number, processes))
        for worker in workers:
            if not isinstance(await _read(worker), Ready):
                raise LoadFailed("a load process spoke out of turn")
        counts.started = time.perf_counter() + HEAD_START
        for worker in workers:
            _write(worker, Start(counts.started))
        await asyncio.gather(*(_follow(number, worker, counts, on_progress) for number, worker in enumerate(workers)))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


async def _follow(
    number: int, worker: asyncio.subprocess.Process, counts: Counts, on_progress: Callable[[Counts], None]
) -> None:
    while True:
        report = await _read(worker)
        if isinstance(report, Finished):
            counts.cpu_shares.append(report.cpu_share)
            return
        if isinstance(report, Progress):
            counts.records += report.records
            counts.num_open[number], counts.num_tokens[number] = report.num_open, report.num_tokens
            on_progress(counts)


async def _spawn() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "legato.benchmark.serve.worker", stdin=pipe, stdout=pipe
    )


def _write(worker: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
    assert worker.stdin is not None
    data = msgspec.msgpack.encode(message)
    worker.stdin.write(len(data).to_bytes(4, "little") + data)


async def _read(worker: asyncio.subprocess.Process) -> Report:
    assert worker.stdout is not None
    try:
        size = int.from_bytes(await worker.stdout.readexactly(4), "little")
        report: Report = msgspec.msgpack.decode(await worker.stdout.readexactly(size), type=Report)
        return report
    except asyncio.IncompleteReadError:
        raise LoadFailed(f"a load process ended with code {await worker.wait()}") from None
