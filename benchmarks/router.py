"""What the router can do by itself: a fake shard that is never waited for, and load on the same cores.

    python -m benchmarks.router --out benchmarks/results/router.json

throughput   64 streams that ask again and again, with text, ids and logprobs; and the same load on a bare ASGI
             application on uvicorn, one event per turn of its loop, as a yardstick for the machine
many         2,000 streams at once: memory of all processes of the router, and how long /health takes meanwhile
paced        the same at the pace of a device, all of them in every step
slow         64 streams beside 100 clients that read a byte per second: what those do to the others' gaps
workers      `throughput` and `many` with one, two and three workers; only when asked for
observed     `throughput` without log lines, with one for each request, and with traces; only when asked for
drafts       `throughput` with drafts (`--speculate`), which is the default, and without; only when asked for
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.collector import CountingCollector
from benchmarks.load import Load, generate_stream, health
from benchmarks.processes import launched, serving
from legato.benchmark.report import environment, percentile, write_json
from legato.common.sockets import free_port

APP_EVENTS = 32
APP_EVENT = (
    b'data: {"index":1,"token":{"id":1234,"text":" hello","logprob":-1.2345678,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)
STREAMS, NEW_TOKENS = 64, 256
MANY, MANY_TOKENS = 2000, 1000
# All of them in every step: 20,000 tokens a second.
PACED_TOKENS, PACED_STEP_MS = 200, 100
SLOW, BYTES_PER_SECOND = 100, 1
WORKERS = (1, 2, 3)
# If permitted, the health probe has priority: it should wait for the server, not for a core that the load uses.
PROBE_NICENESS = -10


@contextmanager
def router(
    max_requests: int, workers: int | None, model: str | None, *extra: str, source: Path | None = None
) -> Iterator[tuple[int, psutil.Process]]:
    """A launcher with a fake shard; the port, and the router's first process."""
    words = ["--fake", f"--max-concurrent-requests={max_requests}", "--logger-level=warn", *extra]
    words += [f"--http-workers={workers}"] if workers else []
    words += [f"--model-id={model}"] if model else []
    with launched(*words, source=source) as (port, launcher):
        children = psutil.Process(launcher.pid).children()
        yield port, next(child for child in children if is_router(child))


def is_router(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return "text-generation-router" in line or "legato.router.cli" in line


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def memory(process: psutil.Process) -> float:
    """Megabytes of a process and its children; what they share counts once."""
    return float(sum(each.memory_full_info().pss for each in family(process))) / 1e6


def cpu_seconds(process: psutil.Process) -> float:
    return sum(times.user + times.system for times in (each.cpu_times() for each in family(process)))


def elsewhere_seconds() -> float:
    """CPU time that other processes, or other virtual machines on the same host, have had so far: figures from a busy
    machine say little."""
    times = psutil.cpu_times()
    idle = times.idle + times.iowait + times.guest + times.guest_nice  # what guests take is counted twice
    return float(sum(times) - idle) - cpu_seconds(psutil.Process())


# ---- the scenarios ---------------------------------------------------------------------------------------------------


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A bare ASGI application: one event per turn of the event loop."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(APP_EVENTS):
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": APP_EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def bare_asgi(seconds: float) -> float:
    """Events per second of `app` on uvicorn."""
    port = free_port()
    words = ["--port", str(port), "--http", "httptools", "--loop", "uvloop", "--no-access-log", "--log-level", "error"]
    with serving(port, [sys.executable, "-m", "uvicorn", "benchmarks.router:app", *words], "/"):
        load = Load(port, STREAMS, lambda number: generate_stream("hello", NEW_TOKENS))
        load.run(1)
        counted = load.run(seconds)
        load.close()
    return counted.events_per_second


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    bare = bare_asgi(options.seconds)
    figures = _throughput(options)
    return {
        **figures,
        "bare_asgi_events_per_second": round(bare),
        "ratio": round(figures["tokens_per_second"] / bare, 3),
    }


def _throughput(options: argparse.Namespace) -> dict[str, Any]:
    with router(STREAMS, options.http_workers, options.model_id) as (port, process):
        load = Load(port, STREAMS, lambda number: generate_stream(f"stream {number}", NEW_TOKENS))
        load.run(2)
        before, own_before = cpu_seconds(process), time.process_time()
        counted = load.run(options.seconds, gaps=True)
        cores = (cpu_seconds(process) - before) / counted.seconds
        load_cores = (time.process_time() - own_before) / counted.seconds
        load.close()
    return {
        "streams": STREAMS,
        "new_tokens": NEW_TOKENS,
        "tokens_per_second": round(counted.events_per_second),
        "gap_ms": gaps_of(counted.gaps),
        "router_cores": round(cores, 2),
        "load_cores": round(load_cores, 2),
    }


def many(options: argparse.Namespace) -> dict[str, Any]:
    """As fast as the cores allow: the shard never waits, most streams do."""
    return _many(options, MANY_TOKENS)


def paced(options: argparse.Namespace) -> dict[str, Any]:
    """All streams at once in every step, at the pace of a device."""
    pace = (f"--max-batch-size={MANY}", f"--fake-step-ms={PACED_STEP_MS}")
    return {"step_ms": PACED_STEP_MS, **_many(options, PACED_TOKENS, *pace)}


def _many(options: argparse.Namespace, num_tokens: int, *extra: str) -> dict[str, Any]:
    with (
        router(MANY + 10, options.http_workers, options.model_id, *extra) as (port, process),
        watching(lambda: probe_health(port)) as probes,
    ):
        load = Load(port, MANY, lambda number: generate_stream(f"stream {number}", num_tokens), once=True)
        num_answers, megabytes, started_at, elsewhere = 0, 0.0, time.perf_counter(), elsewhere_seconds()
        while load.num_open and time.perf_counter() < started_at + 120:
            num_answers += load.run(0.5).num_answers
            megabytes = max(megabytes, memory(process))
        seconds, elsewhere = time.perf_counter() - started_at, elsewhere_seconds() - elsewhere
        load.close()
    return {
        "streams": MANY,
        "new_tokens": num_tokens,
        "answered": num_answers,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(num_answers * num_tokens / seconds),
        "router_megabytes": round(megabytes),
        "cores_taken_elsewhere": round(elsewhere / seconds, 2),
        "health_ms": {**gaps_of(probes), "max": round(max(probes) * 1000, 1), "num": len(probes)},
    }


def workers(options: argparse.Namespace) -> dict[str, Any]:
    """What a worker more is good for on this machine."""
    figures = {}
    for num in WORKERS:
        fixed = argparse.Namespace(**{**vars(options), "http_workers": num})
        figures[str(num)] = {"throughput": _throughput(fixed), "many": many(fixed)}
        print(num, json.dumps(figures[str(num)]), flush=True)
    return figures


def observed(options: argparse.Namespace) -> dict[str, Any]:
    """What log lines and traces cost: several servers at once, of which one at a time has load, a second each and again
    and again, so that what else the machine does affects all alike. CPU time is that of all processes of a server."""
    collector = CountingCollector()
    variants = {
        "plain": ("--logger-level=warn",),
        "logged": ("--logger-level=info",),
        "traced": ("--logger-level=warn", f"--otlp-endpoint={collector.endpoint}"),
    }
    if options.beside is not None:
        variants |= {"before": variants["plain"], "before_logged": variants["logged"]}
    figures = _in_turns(options, variants)
    collector.close()
    assert collector.num_bytes > 0, "the collector got nothing"
    return figures


def drafts(options: argparse.Namespace) -> dict[str, Any]:
    """What it costs to look for drafts where steps take no time, so that hardly any can pay."""
    quiet = "--logger-level=warn"
    return _in_turns(options, {"plain": (quiet, "--speculate=0"), "default": (quiet,)})


def _in_turns(options: argparse.Namespace, variants: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Each variant beside the first, "plain"."""
    with ExitStack() as stack:
        servers = {}
        for name, words in variants.items():
            source = options.beside if name.startswith("before") else None
            servers[name] = stack.enter_context(_loaded(options, *words, source=source))
        slices: list[dict[str, tuple[float, float]]] = []
        for number in range(options.rounds):
            first = number % len(servers)
            order = list(servers)[first:] + list(servers)[:first]
            slices.append({name: _slice(*servers[name]) for name in order})
    rates = {name: [each[name][0] for each in slices] for name in variants}
    costs = {name: [each[name][1] for each in slices] for name in variants}
    figures: dict[str, Any] = {}
    for name in variants:
        figures[name] = {
            "tokens_per_second": round(statistics.median(rates[name])),
            "tokens_per_second_ratio": round(statistics.median(rates[name]) / statistics.median(rates["plain"]), 3),
            "cpu_us_per_token": round(statistics.median(costs[name]), 2),
            # The least of all slices: other processes can only make it more.
            "least_cpu_us_per_token": round(min(costs[name]), 2),
            "cpu_us_per_token_ratio": round(statistics.median(costs[name]) / statistics.median(costs["plain"]), 3),
            "least_cpu_us_per_token_ratio": round(min(costs[name]) / min(costs["plain"]), 3),
        }
    return {**figures, "streams": STREAMS, "new_tokens": NEW_TOKENS, "rounds": options.rounds}


@contextmanager
def _loaded(options: argparse.Namespace, *extra: str, source: Path | None) -> Iterator[tuple[Load, psutil.Process]]:
    with router(STREAMS, options.http_workers, options.model_id, *extra, source=source) as (port, process):
        load = Load(port, STREAMS, lambda number: generate_stream(f"stream {number}", NEW_TOKENS))
        load.run(2)
        yield load, process.parent()
        load.close()


def _slice(load: Load, process: psutil.Process) -> tuple[float, float]:
    """Tokens per second, and microseconds of CPU time of all processes of a server per token. Streams that were paused
    go on first."""
    load.run(0.3)
    before = cpu_seconds(process)
    counted = load.run(1.0)
    used = cpu_seconds(process) - before
    return counted.events_per_second, used / counted.seconds / counted.events_per_second * 1e6


def slow(options: argparse.Namespace) -> dict[str, Any]:
    """In turns, because a machine's mood changes; the median of the rounds counts."""
    rounds = []
    with router(STREAMS + SLOW, options.http_workers, options.model_id) as (port, _):
        for _ in range(3):
            alone = measure_gaps(port, options.seconds)
            with watching(lambda: read_slowly(port)):
                time.sleep(2)
                beside = measure_gaps(port, options.seconds)
            rounds.append({"alone_ms": gaps_of(alone), "beside_ms": gaps_of(beside)})
    ratios = sorted(each["beside_ms"]["p99"] / each["alone_ms"]["p99"] for each in rounds)
    return {"streams": STREAMS, "slow_readers": SLOW, "p99_ratio": round(ratios[len(ratios) // 2], 3), "rounds": rounds}


def measure_gaps(port: int, seconds: float) -> list[float]:
    load = Load(port, STREAMS, lambda number: generate_stream(f"stream {number}", NEW_TOKENS))
    load.run(1)
    counted = load.run(seconds, gaps=True)
    load.close()
    return counted.gaps


def gaps_of(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{percent}": round(percentile(ordered, percent) * 1000, 2) for percent in (50, 99)}


# ---- what happens meanwhile, in a process of its own -----------------------------------------------------------------


@contextmanager
def watching(work: Callable[[], Iterator[float]]) -> Iterator[list[float]]:
    """Runs `work` until the end of the block; what it has yielded is in the list then."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_collect, args=(work, theirs))
    process.start()
    collected: list[float] = []
    try:
        yield collected
    finally:
        ours.send(None)
        collected += ours.recv()
        process.join()


def _collect(work: Callable[[], Iterator[float]], stop: Connection) -> None:
    values: list[float] = []
    for value in work():
        values.append(value)
        if stop.poll():
            break
    stop.send(values)


def probe_health(port: int) -> Iterator[float]:
    with suppress(PermissionError):
        os.nice(PROBE_NICENESS)
    for seconds in health(port):
        yield seconds
        time.sleep(0.02)


def read_slowly(port: int) -> Iterator[float]:
    """Clients with small buffers, who ask for much and hardly read."""
    connections = []
    for number in range(SLOW):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(generate_stream(f"slow {number}", 4000))
        connections.append(connection)
    while True:
        for connection in connections:
            try:
                connection.recv(BYTES_PER_SECOND)
            except ConnectionError:
                continue  # the server has had enough
            yield 0.0
            time.sleep(1 / SLOW)


SCENARIOS = {"throughput": throughput, "many": many, "paced": paced, "slow": slow}
ON_DEMAND = {"workers": workers, "observed": observed, "drafts": drafts}


def main() -> None:
    parser = argparse.ArgumentParser(description="The router alone, with a fake shard.")
    names = [*SCENARIOS, *ON_DEMAND, []]
    parser.add_argument(
        "scenarios", nargs="*", choices=names, help="which to run; without names all but those on demand"
    )
    parser.add_argument("--model-id", help="whose tokenizer to use; the default model's by default")
    parser.add_argument("--http-workers", type=int, help="workers of the router; its default by default")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of `observed` and `drafts`")
    parser.add_argument("--beside", type=Path, help="another checkout, for `observed` to measure beside this one")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures = {}
    for name in options.scenarios or SCENARIOS:
        figures[name] = (SCENARIOS | ON_DEMAND)[name](options)
        print(name, json.dumps(figures[name]), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, {**environment(), **figures})


if __name__ == "__main__":
    main()
