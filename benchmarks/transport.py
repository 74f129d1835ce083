"""What it costs to carry a step to a shard and its tokens back, for six ways to do it and our own messages.

    python -m benchmarks.transport --out benchmarks/results/transport.json

Two processes and a unix socket; `transport_shard.py` is the other one. *Flat out* the shard answers at once: round trip
and CPU time of each side. *Paced* it takes as long as a real device, two steps in flight where the transport allows:
how long the device waits for its next step, how long after its end the tokens are here, and what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.transport_shard import (
    LENGTH,
    PACES,
    REQUEST,
    RESPONSE,
    STREAM,
    UNARY,
    Device,
    serve_aio,
    serve_framed,
    serve_sync,
)
from legato.benchmark.report import environment, markdown, percentile
from legato.pb import generate_pb2 as pb

BATCHES = (1, 64, 256, 512)
PACED_SECONDS = 2.0
SEGMENTS = 3  # the quietest counts


# ---- the router's side -----------------------------------------------------------------------------------------------


class Driver:
    """Keeps `depth` steps in flight until `steps` have answered. `send` is the transport's, and so is the thread."""

    def __init__(self, rows: int, steps: int, depth: int, done: Callable[[], None]) -> None:
        self._rows = list(range(rows))
        self._left = steps
        self._depth = min(depth, steps)
        self._done = done
        self._sent: deque[float] = deque()
        self.send: Callable[[pb.StepRequest], None] = lambda request: None
        self.round_trips: list[float] = []
        self.deliveries: list[float] = []  # from the end of the step on the device
        self.last: pb.StepResponse | None = None

    def start(self) -> None:
        for _ in range(self._depth):
            self._next()

    def _next(self) -> None:
        rows, number = self._rows, self._left
        self._left -= 1
        grown = [int((row + number) % 16 == 0) for row in rows]  # a block of 16 tokens is full now and then
        request = REQUEST(
            id=number, rows=rows, num_tokens=[1] * len(rows), num_new_blocks=grown, new_blocks=[77] * sum(grown)
        )
        self._sent.append(time.perf_counter())
        self.send(request)

    def on_response(self, response: pb.StepResponse) -> None:
        now = time.perf_counter()
        list(response.token_ids), list(response.logprobs)  # what the router does with it first
        self.round_trips.append(now - self._sent.popleft())
        self.deliveries.append(now - response.total_ns / 1e9)
        self.last = response
        if self._left:
            self._next()
        elif not self._sent:
            self._done()


class SyncUnary:
    def __init__(self, path: str) -> None:
        self._call = _sync_channel(path).unary_unary(UNARY, REQUEST.SerializeToString, RESPONSE.FromString)

    def run(self, rows: int, steps: int, depth: int) -> Driver:
        waiting: list[pb.StepRequest] = []
        driver = Driver(rows, steps, 1, lambda: None)
        driver.send = waiting.append
        driver.start()
        while waiting:
            driver.on_response(self._call(waiting.pop(), wait_for_ready=True))
        return driver


class SyncStream:
    def __init__(self, path: str) -> None:
        call = _sync_channel(path).stream_stream(STREAM, REQUEST.SerializeToString, RESPONSE.FromString)
        self._outbox: queue.SimpleQueue[pb.StepRequest] = queue.SimpleQueue()
        self._answers = call(iter(self._outbox.get, None), wait_for_ready=True)

    def run(self, rows: int, steps: int, depth: int) -> Driver:
        done: list[bool] = []
        driver = Driver(rows, steps, depth, lambda: done.append(True))
        driver.send = self._outbox.put
        driver.start()
        while not done:
            driver.on_response(next(self._answers))
        return driver


class OnLoop:
    """Transports on uvloop, the router's event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = uvloop.new_event_loop()
        self._driver: Driver | None = None
        self._loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        raise NotImplementedError

    def _send(self, request: pb.StepRequest) -> None:
        raise NotImplementedError

    def run(self, rows: int, steps: int, depth: int) -> Driver:
        async def run() -> Driver:
            done = self._loop.create_future()
            driver = self._driver = Driver(rows, steps, depth, lambda: done.set_result(None))
            driver.send = self._send
            driver.start()
            await done
            return driver

        return self._loop.run_until_complete(run())

    def _deliver(self, response: pb.StepResponse) -> None:
        assert self._driver is not None
        self._driver.on_response(response)


class AioUnary(OnLoop):
    async def _connect(self) -> None:
        channel = grpc.aio.insecure_channel(f"unix://{self._path}")
        self._call = channel.unary_unary(UNARY, REQUEST.SerializeToString, RESPONSE.FromString)

    def _send(self, request: pb.StepRequest) -> None:
        self._loop.create_task(self._exchange(request))

    async def _exchange(self, request: pb.StepRequest) -> None:
        self._deliver(await self._call(request, wait_for_ready=True))


class AioStream(OnLoop):
    """As `router/shards.py` has it."""

    async def _connect(self) -> None:
        channel = grpc.aio.insecure_channel(f"unix://{self._path}")
        call = channel.stream_stream(STREAM, REQUEST.SerializeToString, RESPONSE.FromString)
        self._outbox: asyncio.Queue[pb.StepRequest] = asyncio.Queue()
        self._reader = self._loop.create_task(self._read(call(self._drain(), wait_for_ready=True)))

    async def _drain(self) -> AsyncIterator[pb.StepRequest]:
        while True:
            yield await self._outbox.get()

    async def _read(self, answers: AsyncIterable[pb.StepResponse]) -> None:
        async for response in answers:
            self._deliver(response)

    def _send(self, request: pb.StepRequest) -> None:
        self._outbox.put_nowait(request)


class Framed(OnLoop):
    async def _connect(self) -> None:
        while not os.path.exists(self._path):
            await asyncio.sleep(0.01)
        self._transport: Any
        self._transport, _ = await self._loop.create_unix_connection(lambda: _Frames(self._deliver), self._path)

    def _send(self, request: pb.StepRequest) -> None:
        data = request.SerializeToString()
        self._transport.write(LENGTH.pack(len(data)) + data)


class _Frames(asyncio.Protocol):
    def __init__(self, deliver: Callable[[pb.StepResponse], None]) -> None:
        self._deliver = deliver
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            response = RESPONSE.FromString(bytes(self._received[LENGTH.size : end]))
            del self._received[:end]
            self._deliver(response)


def _sync_channel(path: str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix://{path}")


@dataclass(frozen=True)
class Transport:
    name: str
    client: type[Any]
    serve: Callable[[str, Device], None]
    depth: int  # steps in flight


TRANSPORTS = {
    "unary": Transport("gRPC unary, threads", SyncUnary, serve_sync, 1),
    "aio-unary": Transport("grpc.aio unary", AioUnary, serve_aio, 1),
    "aio-pipelined": Transport("grpc.aio unary, pipelined", AioUnary, serve_aio, 2),
    "aio-stream": Transport("grpc.aio stream", AioStream, serve_aio, 2),
    "stream": Transport("gRPC stream, threads", SyncStream, serve_sync, 2),
    "framed": Transport("length-framed socket", Framed, serve_framed, 2),
}


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """All times in microseconds, CPU and idle time per step."""

    transport: str
    rows: int
    depth: int
    steps_per_second: float
    round_trip_p50: float
    round_trip_p99: float
    router_cpu: float
    shard_cpu: float
    # Of paced steps: device without a step, from the end of a step to its tokens, and CPU time of both sides as a
    # share of two cores.
    device_idle: float | None = None
    delivery_p50: float | None = None
    delivery_p99: float | None = None
    two_cores: float | None = None


def measure(key: str, client: Any, rows: int, steps: int, depth: int, pace: float | None) -> Figures:
    client.run(rows, min(steps, 50), depth)
    before: pb.StepResponse = client.run(0, 1, 1).last
    cpu, wall = time.process_time(), time.perf_counter()
    driver: Driver = client.run(rows, steps, depth)
    router_cpu, seconds = time.process_time() - cpu, time.perf_counter() - wall
    after: pb.StepResponse = client.run(0, 1, 1).last
    shard_cpu = (after.total_ns - before.total_ns) / 1e9
    trips, deliveries = sorted(driver.round_trips), sorted(driver.deliveries)
    figures = Figures(
        key, rows, depth, steps / seconds, percentile(trips, 50) * 1e6, percentile(trips, 99) * 1e6,
        router_cpu / steps * 1e6, shard_cpu / steps * 1e6,
    )  # fmt: skip
    if pace is None:
        return figures
    return Figures(
        **{name: value for name, value in asdict(figures).items() if value is not None},
        device_idle=after.forward_ns / steps / 1e3,
        delivery_p50=percentile(deliveries, 50) * 1e6,
        delivery_p99=percentile(deliveries, 99) * 1e6,
        two_cores=(router_cpu + shard_cpu) / (2 * steps * pace),
    )


def measure_all(keys: list[str], steps: int) -> dict[str, list[Figures]]:
    flat, paced = [], []
    for key in keys:
        transport = TRANSPORTS[key]
        with _shard(key, paced=False) as path:
            client = transport.client(path)
            for rows in BATCHES:
                segments = [measure(key, client, rows, steps, 1, None) for _ in range(SEGMENTS)]
                flat.append(min(segments, key=lambda figures: figures.round_trip_p50))
        with _shard(key, paced=True) as path:
            client = transport.client(path)
            for rows, pace in PACES.items():
                count = int(PACED_SECONDS / pace)
                paced.append(measure(key, client, rows, count, transport.depth, pace))
        print(f"{transport.name}: done", file=sys.stderr, flush=True)
    return {"flat_out": flat, "paced": paced}


@contextmanager
def _shard(key: str, paced: bool) -> Iterator[str]:
    """The socket of a shard process for one transport. It ends when its standard input does."""
    with tempfile.TemporaryDirectory(prefix="legato-transport-") as folder:
        words = [sys.executable, "-m", "benchmarks.transport", "--serve", key, "--socket", f"{folder}/shard"]
        with subprocess.Popen([*words, *["--paced"] * paced], stdin=subprocess.PIPE):
            yield f"{folder}/shard"


def serve(key: str, path: str, paced: bool) -> None:
    def end_with_stdin() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    TRANSPORTS[key].serve(path, Device(paced))


def tables(found: dict[str, list[Figures]]) -> str:
    flat = [
        [TRANSPORTS[f.transport].name, str(f.rows), f"{f.round_trip_p50:.0f}", f"{f.round_trip_p99:.0f}",
         f"{f.router_cpu:.0f}", f"{f.shard_cpu:.0f}"]
        for f in found["flat_out"]
    ]  # fmt: skip
    paced = [
        [TRANSPORTS[f.transport].name, str(f.rows), f"{PACES[f.rows] * 1e3:.1f}", f"{f.device_idle:.0f}",
         f"{f.delivery_p50:.0f}", f"{f.delivery_p99:.0f}", f"{f.router_cpu:.0f}", f"{f.shard_cpu:.0f}",
         f"{f.two_cores:.1%}"]
        for f in found["paced"]
    ]  # fmt: skip
    head = ("Transport", "Rows", "Round trip p50 µs", "p99", "Router CPU µs", "Shard CPU µs")
    paced_head = ("Transport", "Rows", "Step ms", "Device idle µs", "Delivery p50 µs", "p99", "Router CPU µs",
                  "Shard CPU µs", "Of two cores")  # fmt: skip
    return f"{markdown(head, flat)}\n\n{markdown(paced_head, paced)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to carry steps, by transport.")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=300, help="steps of each of three segments, flat out")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--serve", choices=TRANSPORTS, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.socket, options.paced)
        return
    found = measure_all(options.transport or list(TRANSPORTS), options.steps)
    print(tables(found))
    if options.out is not None:
        figures = {name: [asdict(each) for each in listed] for name, listed in found.items()}
        paces = {str(rows): pace * 1e3 for rows, pace in PACES.items()}
        content = {**environment(), "step_ms_by_rows": paces, **figures}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
