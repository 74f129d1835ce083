"""Attacks on a server that has 64 streams to serve: what they do to the gaps between tokens, and to memory.

    python -m benchmarks.attacks [--json benchmarks/results/attacks.json] [--only NAME]

A launcher with real processes, API keys and a fake shard at the pace of a device serves 64 streams of an honest key.
Each attack comes from a process of its own that leaves the server its cores as far as it can: an attacker has machines
of its own. Seconds with and without the attack alternate, so that whatever else the machine does is in both. Bounds:
the 99th percentile of the gaps moves by at most 20 %, memory of the router's processes by at most 64 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import Load, generate_stream
from benchmarks.processes import launched, leave_nothing_behind
from legato.benchmark.report import environment, percentile

STREAMS, NEW_TOKENS, STEP_MS = 64, 400, 30
SECONDS, ROUNDS = 12.0, 4
MAX_GAP_RATIO, MAX_MEGABYTES = 1.20, 64.0
HONEST, HOSTILE = "honest-key", "hostile-key"
HOST = b"Host: localhost\r\n"
KEY = f"Authorization: Bearer {HOSTILE}\r\n".encode()
# Of an attacker: fast enough to hurt, slow enough to leave the machine to the server.
PAUSE = 0.002

Attack = Callable[[int, Event], None]


# ---- the attacks -----------------------------------------------------------------------------------------------------


class Flock:
    """Connections of an attacker, of which some are always lost."""

    def __init__(self, port: int, num: int) -> None:
        self._port = port
        self._connections: list[socket.socket] = []
        self._most = num

    def grow(self, first_words: bytes) -> None:
        if len(self._connections) < self._most:
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", self._port), timeout=1)
                connection.sendall(first_words)
                connection.setblocking(False)
                self._connections.append(connection)

    def say(self, words: bytes) -> None:
        """To each, as much as it takes. Those that were closed are replaced."""
        for connection in list(self._connections):
            try:
                with suppress(BlockingIOError):
                    connection.recv(65536)
                with suppress(BlockingIOError):
                    connection.send(words)
            except OSError:
                self._connections.remove(connection)
                connection.close()


def attack_with(port: int, stop: Event, num: int, first_words: bytes, words: bytes, pause: float = PAUSE) -> None:
    flock = Flock(port, num)
    while not stop.is_set():
        flock.grow(first_words)
        flock.say(words)
        time.sleep(pause)


def endless_headers(port: int, stop: Event) -> None:
    """Header lines without end on 8 connections, without a key."""
    attack_with(port, stop, 8, b"GET /info HTTP/1.1\r\n" + HOST, b"X-Filler: " + b"x" * 4000 + b"\r\n")


def endless_url(port: int, stop: Event) -> None:
    """A request line without end on 8 connections, without a key."""
    attack_with(port, stop, 8, b"GET /", b"x" * 4000)


def slow_headers(port: int, stop: Event) -> None:
    """500 connections that send a byte of a header now and then."""
    attack_with(port, stop, 500, b"GET /info HTTP/1.1\r\n" + HOST + b"X-Filler: ", b"x", pause=0.01)


def slow_bodies(port: int, stop: Event) -> None:
    """200 connections, each with a megabyte of a body that never ends, with a key."""
    head = b"POST /generate HTTP/1.1\r\nContent-Length: 1900000\r\n" + HOST + KEY + b"\r\n"
    attack_with(port, stop, 200, head, b" " * 16_000, pause=0.01)


def garbage(port: int, stop: Event) -> None:
    """Noise, HTTP/2 prefaces and upgrades, each on a connection of its own."""
    upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    kinds = [os.urandom(200), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", upgrade]
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(random.choice(kinds))
            connection.recv(100)
        time.sleep(PAUSE)


def connections(port: int, stop: Event) -> None:
    """As many connections as there are descriptors, opened as fast as they come."""
    attack_with(port, stop, 900, b"", b"", pause=0.0005)


def pipelined(port: int, stop: Event) -> None:
    """Requests without a key, thousands in advance, of which no answer is read."""
    attack_with(port, stop, 4, b"", b"GET /info HTTP/1.1\r\nHost: a\r\n\r\n" * 100, pause=0.01)


def _post(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _ask_again_and_again(port: int, stop: Event, request: bytes, pause: float) -> None:
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(request)
            connection.recv(1000)
        time.sleep(pause)


def many_tools(port: int, stop: Event) -> None:
    """Chats with thousands of tools, with a key."""
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(5000)]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    _ask_again_and_again(port, stop, _post(json.dumps(body).encode()), pause=0.05)


def flood(port: int, stop: Event) -> None:
    """As many requests as permits, of the highest priority, with a key."""
    body = {"inputs": "flood " * 50, "parameters": {"max_new_tokens": 1000, "ignore_eos": True, "priority": 0}}
    data = json.dumps(body).encode()
    request = b"POST /generate HTTP/1.1\r\n" + HOST + KEY + b"Content-Length: %d\r\n\r\n" % len(data) + data
    attack_with(port, stop, 600, request, b"", pause=0.005)


def long_prompts(port: int, stop: Event) -> None:
    """Prompts of 54,000 tokens, many times what the model takes, to be tokenized, with a key."""
    data = json.dumps({"inputs": "a long prompt, much too long " * 8_000}).encode()
    request = b"POST /generate HTTP/1.1\r\n" + HOST + KEY + b"Content-Length: %d\r\n\r\n" % len(data) + data
    _ask_again_and_again(port, stop, request, pause=0.3)


def slow_readers(port: int, stop: Event) -> None:
    """32 streams of which a byte a second is read, with a key."""
    request = generate_stream("a slow reader", 1000).replace(b"\r\n", b"\r\n" + KEY, 1)
    streams: list[socket.socket] = []
    while not stop.is_set():
        for stream in list(streams):
            try:
                stream.recv(1)
            except OSError:  # it was cut off
                streams.remove(stream)
        while len(streams) < 32:
            streams.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            streams[-1].sendall(request)
        stop.wait(1.0)


ATTACKS: list[Attack] = [
    endless_headers, endless_url, slow_headers, slow_bodies, garbage, connections, pipelined, many_tools, flood,
    long_prompts, slow_readers,
]  # fmt: skip


def _run(attack: Attack, port: int, stop: Event) -> None:
    os.nice(10)
    attack(port, stop)


@contextmanager
def attacking(attack: Attack, port: int, load: Load) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_run, args=(attack, port, stop))
    process.start()
    load.run(1.0)  # its interpreter starts
    try:
        yield
    finally:
        stop.set()
        load.run(0.2)
        process.kill()
        process.join()


# ---- what they do ----------------------------------------------------------------------------------------------------


def megabytes(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / 1e6


def honest_request(number: int) -> bytes:
    request = generate_stream(f"stream {number}", NEW_TOKENS)
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {HONEST}\r\n".encode(), 1)


class Server:
    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.processes = [
            process for process in psutil.Process(pid).children(recursive=True) if "serve" not in process.cmdline()
        ]

    def measured(self, load: Load, seconds: float) -> tuple[list[float], float]:
        """The gaps, in seconds, and the most memory, in megabytes."""
        gaps: list[float] = []
        most = 0.0
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            gaps += load.run(0.5, gaps=True).gaps
            most = max(most, megabytes(self.processes))
        return gaps, most


def compared(server: Server, load: Load, attack: Attack, seconds: float) -> dict[str, Any]:
    quiet_gaps: list[float] = []
    gaps: list[float] = []
    quiet_memory, memory = math.inf, 0.0
    for _ in range(ROUNDS):
        found, most = server.measured(load, seconds / ROUNDS)
        quiet_gaps += found
        quiet_memory = min(quiet_memory, most)
        with attacking(attack, server.port, load):
            found, most = server.measured(load, seconds / ROUNDS)
        gaps += found
        memory = max(memory, most)
        load.run(0.5)
    quiet_gap, gap = (percentile(sorted(each), 99) * 1e3 for each in (quiet_gaps, gaps))
    return {
        "what": (attack.__doc__ or "").strip(),
        "quiet_p99_gap_ms": round(quiet_gap, 2),
        "p99_gap_ms": round(gap, 2),
        "gap_ratio": round(gap / quiet_gap, 3),
        "quiet_mb": round(quiet_memory, 1),
        "mb": round(memory, 1),
        "added_mb": round(memory - quiet_memory, 1),
    }


def results(only: str | None, seconds: float, model: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text(f"{HONEST}\n{HOSTILE}\n")
        words = ["--fake", f"--fake-step-ms={STEP_MS}", "--http-workers=1", "--logger-level=warn"]
        words += [f"--api-key-file={keys}", *([f"--model-id={model}"] if model else [])]
        with launched(*words) as (port, launcher):
            server = Server(port, launcher.pid)
            load = Load(port, STREAMS, honest_request)
            load.run(5.0)
            for attack in ATTACKS:
                if only in (None, attack.__name__):
                    yield attack.__name__, compared(server, load, attack, seconds)
            load.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", help="the name of one attack")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--model-id")
    options = parser.parse_args()
    leave_nothing_behind()
    found: dict[str, Any] = {}
    print(f"{'attack':20}{'p99 quiet':>12}{'p99':>10}{'ratio':>8}{'added MB':>10}")
    for name, figures in results(options.only, options.seconds, options.model_id):
        found[name] = figures
        gaps = f"{figures['quiet_p99_gap_ms']:>12}{figures['p99_gap_ms']:>10}{figures['gap_ratio']:>8}"
        print(f"{name:20}{gaps}{figures['added_mb']:>10}", flush=True)
    bounds = {"gap_ratio": MAX_GAP_RATIO, "added_mb": MAX_MEGABYTES}
    broken = [name for name, each in found.items() if any(each[key] > bound for key, bound in bounds.items())]
    if options.json:
        figures = {"environment": environment(), "streams": STREAMS, "bounds": bounds, "attacks": found}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if broken:
        sys.exit(f"beyond the bounds: {', '.join(broken)}")


if __name__ == "__main__":
    main()
