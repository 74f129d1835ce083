"""One of the processes that make the load: `python -m legato.benchmark.serve.worker`, started by `serve_load.py`.

    stdin   Assignment, then, when every process is ready, Start
    stdout  Ready, then Progress now and then, then Finished

Each is a message in MessagePack behind its length. Closed loop: every slot sends its next request when the last one is
answered. Open loop: requests are sent when they are due, however many are out.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO, TypeVar

import msgspec

from legato.benchmark.serve.client import Client, Record
from legato.benchmark.serve.work import Level, Target, Work

T = TypeVar("T")

REPORT_SECONDS = 0.25


class Assignment(msgspec.Struct, frozen=True):
    """What process `number` of `num_processes` does."""

    target: Target
    work: Work
    level: Level
    number: int
    num_processes: int

    def slots(self) -> list[Iterator[int]]:
        """For each of our slots the numbers of its requests. Dealt out slot by slot, so that all have as much to do."""
        assert self.level.concurrency is not None
        count, last = self.level.concurrency, self.level.num_requests
        return [
            iter(range(slot, last, count)) if last is not None else itertools.count(slot, count)
            for slot in range(self.number, count, self.num_processes)
        ]

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """Our share of the arrivals: number of the request, and seconds after the start."""
        everybody = zip(self.level.numbers(), self.level.arrivals(self.work.seed), strict=False)
        return itertools.islice(everybody, self.number, None, self.num_processes)


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class Start(msgspec.Struct, frozen=True):
    """By `time.perf_counter`, which counts the same in all processes of a machine."""

    at: float


class Progress(msgspec.Struct, tag=True, frozen=True):
    """What is new since the last one."""

    records: list[Record]
    num_open: int
    num_tokens: int


class Finished(msgspec.Struct, tag=True, frozen=True):
    """How busy the process was: near 1 it could not keep up, and the figures are those of the client."""

    cpu_share: float


Report = Ready | Progress | Finished


class Load:
    def __init__(self, assignment: Assignment, started: float) -> None:
        self._assignment = assignment
        self._client = Client(assignment.target, started)
        self._started = started
        self._records: list[Record] = []

    async def run(self, out: BinaryIO) -> None:
        reporting = asyncio.ensure_future(self._keep_reporting(out))
        await asyncio.sleep(self._started - time.perf_counter())
        cpu, wall = time.process_time(), time.perf_counter()
        await (self._closed() if self._assignment.level.rate is None else self._open())
        share = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)
        reporting.cancel()
        self._report(out)
        write(out, Finished(share))
        self._client.close()

    async def _closed(self) -> None:
        await asyncio.gather(*(self._slot(numbers) for numbers in self._assignment.slots()))

    async def _slot(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if self._is_over(time.perf_counter() - self._started):
                return
            await self._request(number, time.perf_counter())

    async def _open(self) -> None:
        """Latency counts from when a request was due: one that we were too busy to send has waited, too."""
        async with asyncio.TaskGroup() as requests:
            for number, moment in self._assignment.arrivals():
                if self._is_over(moment):
                    break
                due = self._started + moment
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                requests.create_task(self._request(number, due))

    async def _request(self, number: int, due: float) -> None:
        record = await self._client.request(self._assignment.work.job(number), due)
        self._records.append(record)  # not before: a report takes the list away and leaves a new one

    def _is_over(self, moment: float) -> bool:
        """After this no request is sent; those that are out are waited for."""
        duration = self._assignment.level.duration
        return duration is not None and moment >= duration

    async def _keep_reporting(self, out: BinaryIO) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report(out)

    def _report(self, out: BinaryIO) -> None:
        records, self._records = self._records, []
        try:
            write(out, Progress(records, self._client.num_open, self._client.num_tokens))
        except BrokenPipeError:
            os._exit(1)  # the command is gone, and with it everybody who wanted to know


def write(out: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    out.write(len(data).to_bytes(4, "little") + data)
    out.flush()


def read(source: BinaryIO, kind: type[T]) -> T:
    size = int.from_bytes(source.read(4), "little")
    return msgspec.msgpack.decode(source.read(size), type=kind)


def main() -> None:
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the command decides
    source, out = sys.stdin.buffer, sys.stdout.buffer
    assignment = read(source, Assignment)
    write(out, Ready())
    start = read(source, Start)

    async def run() -> None:
        await Load(assignment, start.at).run(out)

    uvloop.run(run())


if __name__ == "__main__":
    main()
