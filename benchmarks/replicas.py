"""What `legato route` costs, and what it brings: fake shards, real processes, load on the same cores.

    python -m benchmarks.replicas --out benchmarks/results/replicas.json

overhead       one replica, directly and through the balancer in turns: time to the first token, tokens per second of 64
               streams whose shard never waits, and of 64 at the pace of a device
scaling        four replicas at the pace of a device beside one, both through the balancer
conversations  64 conversations of 8 turns: prompt tokens found in caches with four replicas, by policy, beside one
               server with a cache as large as all of theirs
killed         200 streams on four replicas, one of which is killed: every stream must have every token once, and the
               tokens that a server gives alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.load import Load, generate_stream
from benchmarks.processes import HOST, launched, serving
from legato.benchmark.report import environment
from legato.benchmark.shard import WITHOUT_DRAFTS
from legato.common.sockets import free_port

KEY = "benchmarks-of-the-balancer"
STREAMS, NEW_TOKENS = 64, 128
STEP_MS = 20
# Rows of a paced replica: 16 rows in steps of 20 ms are 800 tokens a second.
ROWS = 16
CONVERSATIONS, TURNS, AT_ONCE = 64, 8, 16
KILLED_STREAMS, KILLED_TOKENS = 200, 150


@contextmanager
def servers(num: int, *words: str, model: str | None) -> Iterator[list[tuple[int, Any]]]:
    """Started together, because starting one takes seconds."""
    common = ["--fake", f"--route-key={KEY}", "--http-workers=1", "--prometheus-port=0", "--logger-level=warn"]
    common += [f"--model-id={model}"] if model else []
    common.append(WITHOUT_DRAFTS)  # requests come again and would be guessed: faster than the pace
    with ExitStack() as stack:
        with ThreadPoolExecutor(num) as pool:
            found = list(pool.map(lambda _: stack.enter_context(launched(*common, *words)), range(num)))
        yield found


@contextmanager
def balancer(ports: list[int], policy: str = "prefix") -> Iterator[tuple[int, Any]]:
    port = free_port()
    urls = [f"--replica=http://{HOST}:{each}" for each in ports]
    words = [f"--hostname={HOST}", f"--port={port}", f"--policy={policy}", f"--route-key={KEY}", "--logger-level=error"]
    command = [sys.executable, "-m", "legato.balancer.cli", *words, *urls, "--probe-interval=0.5"]
    with serving(port, command) as process:
        deadline = time.monotonic() + 30
        while metric(port, "legato_route_replicas_available") < len(ports):
            assert time.monotonic() < deadline, "the replicas are not ready"
            time.sleep(0.1)
        yield port, process


def metric(port: int, name: str) -> float:
    text = urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30).read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


# ---- what it costs ---------------------------------------------------------------------------------------------------


def first_token(connection: socket.socket, number: int) -> float:
    """Seconds to the first byte of a stream of one token."""
    request = generate_stream(f"hello {number}", 1)
    started = time.perf_counter()
    connection.sendall(request)
    connection.recv(1)
    seconds = time.perf_counter() - started
    rest = b""
    while not rest.endswith(b"0\r\n\r\n"):
        rest += connection.recv(1 << 16)
    return seconds


def added_latency(direct: int, routed: int, num: int) -> dict[str, Any]:
    """In turns, so that what else the machine does affects both alike."""
    connections = [socket.create_connection((HOST, port)) for port in (direct, routed)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times: list[list[float]] = [[], []]
    for number in range(num):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(first_token(connections[which], number))
    medians = [statistics.median(each) * 1000 for each in times]
    return {
        "direct_ms": round(medians[0], 3),
        "routed_ms": round(medians[1], 3),
        "added_ms": round(medians[1] - medians[0], 3),
        "requests": num,
    }


def throughput(direct: tuple[int, Any], routed: tuple[int, Any], rounds: int) -> dict[str, Any]:
    """Slices of a second, in turns. CPU times are of whole processes: they say what the balancer costs even where it
    takes cores from nobody."""
    rates: list[list[float]] = [[], []]
    num_tokens, spent = [0, 0], [[0.0] * 3, [0.0] * 3]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            port = (direct, routed)[which][0]
            load = Load(port, STREAMS, lambda number: generate_stream(f"stream {number}", NEW_TOKENS))
            load.run(0.3)
            before = [_cpu(direct[1].pid), _cpu(routed[1].pid), _cpu(None)]
            counted = load.run(1.0)
            after = [_cpu(direct[1].pid), _cpu(routed[1].pid), _cpu(None)]
            load.close()  # what the server still computes for it would count in the next slice
            rates[which].append(counted.events_per_second)
            num_tokens[which] += counted.num_events
            spent[which] = [sum + now - then for sum, now, then in zip(spent[which], after, before, strict=True)]
    medians = [statistics.median(each) for each in rates]
    cpu = [[seconds / num * 1e6 for seconds in each] for each, num in zip(spent, num_tokens, strict=True)]
    return {
        "streams": STREAMS,
        "direct_tokens_per_second": round(medians[0]),
        "routed_tokens_per_second": round(medians[1]),
        "ratio": round(medians[1] / medians[0], 3),
        "balancer_cpu_us_per_token": round(cpu[1][1], 2),
        "server_cpu_us_per_token": {"direct": round(cpu[0][0], 2), "routed": round(cpu[1][0], 2)},
        "load_cpu_us_per_token": {"direct": round(cpu[0][2], 2), "routed": round(cpu[1][2], 2)},
        "rounds": rounds,
    }


def _cpu(pid: int | None) -> float:
    """Seconds of a process and its children; of this one without them for None."""
    process = psutil.Process(pid)
    found = [process] if pid is None else [process, *process.children(recursive=True)]
    return sum(float(times.user + times.system) for times in (each.cpu_times() for each in found))


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with servers(1, model=options.model_id) as [direct], balancer([direct[0]]) as routed:
        found["first_token"] = added_latency(direct[0], routed[0], 40 * options.rounds)
        found["unpaced"] = throughput(direct, routed, options.rounds)
    with (
        servers(1, f"--fake-step-ms={STEP_MS}", model=options.model_id) as [direct],
        balancer([direct[0]]) as routed,
    ):
        found["paced"] = throughput(direct, routed, options.rounds)
        found["paced"]["step_ms"] = STEP_MS
    return found


# ---- what it brings --------------------------------------------------------------------------------------------------


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    pace = (f"--fake-step-ms={STEP_MS}", f"--max-batch-size={ROWS}")
    rates = {}
    with servers(4, *pace, model=options.model_id) as found:
        ports = [port for port, _ in found]
        for num in (1, 4):
            with balancer(ports[:num]) as (routed, _):
                load = Load(routed, 2 * ROWS * num, lambda number: generate_stream(f"stream {number}", NEW_TOKENS))
                load.run(3)
                rates[num] = load.run(2 * options.rounds).events_per_second
                load.close()
    return {
        "rows": ROWS,
        "step_ms": STEP_MS,
        "one_tokens_per_second": round(rates[1]),
        "four_tokens_per_second": round(rates[4]),
        "ratio": round(rates[4] / rates[1], 2),
    }


async def converse(port: int, number: int, turns: int) -> None:
    words = [f"topic{(number * 7919 + i * 31) % 9973}" for i in range(120)]
    messages = [{"role": "system", "content": "You answer in a few words. " + " ".join(words)}]
    async with aiohttp.ClientSession() as session:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn} of {number}: " + " ".join(words[turn::9])})
            body = {"messages": messages, "max_tokens": 32, "ignore_eos": True, "seed": number}
            async with session.post(f"http://{HOST}:{port}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def all_conversations(port: int) -> float:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await converse(port, number, TURNS)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CONVERSATIONS)))
    return time.perf_counter() - started


def hits(ports: list[int]) -> tuple[float, float]:
    names = ("legato_prefix_hit_tokens", "legato_prompt_tokens")
    return tuple(sum(metric(port, name) for port in ports) for name in names)  # type: ignore[return-value]


def conversations(options: argparse.Namespace) -> dict[str, Any]:
    """Fresh servers for every policy. What one big cache gives is the most that any policy could."""
    tokens = 40_000  # of the KV cache of one replica: a quarter of all conversations, and some room
    figures: dict[str, Any] = {}
    cases = [
        ("one big cache", 1, "prefix"),
        *((policy, 4, policy) for policy in ("prefix", "least-load", "round-robin")),
    ]
    for name, num, policy in cases:
        limits = (f"--max-batch-total-tokens={tokens * 4 // num}", "--prefix-cache-mb=100000", "--fake-step-ms=2")
        with servers(num, *limits, model=options.model_id) as found:
            ports = [port for port, _ in found]
            with balancer(ports, policy) as (routed, _):
                seconds = asyncio.run(all_conversations(routed))
            hit, prompt = hits(ports)
        figures[name] = {"hit_tokens": int(hit), "prompt_tokens": int(prompt), "hit_rate": round(hit / prompt, 4)}
        figures[name]["seconds"] = round(seconds, 1)
        print(name, figures[name], flush=True)
    best = figures["one big cache"]["hit_rate"]
    for name in figures:
        figures[name]["of_one_big_cache"] = round(figures[name]["hit_rate"] / best, 4)
    return {"conversations": CONVERSATIONS, "turns": TURNS, "kv_tokens_per_replica": tokens, **figures}


@dataclass
class Seen:
    """Of one stream."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    gap: float = 0.0
    error: str | None = None


async def watch(session: aiohttp.ClientSession, port: int, number: int, seen: Seen) -> None:
    sampled = {"max_new_tokens": KILLED_TOKENS, "ignore_eos": True, "do_sample": True, "seed": number}
    body = {"inputs": f"stream {number}", "parameters": sampled}
    last = time.perf_counter()
    async with session.post(f"http://{HOST}:{port}/generate_stream", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            if "token" not in event:
                seen.error = event.get("error", "?")
                return
            now = time.perf_counter()
            seen.gap, last = max(seen.gap, now - last if seen.tokens else 0.0), now
            seen.tokens.append((event["index"], event["token"]["id"]))


async def many(port: int, victim: Any = None) -> list[Seen]:
    """With a `victim`: kills it when half of the tokens are here."""
    streams = [Seen() for _ in range(KILLED_STREAMS)]
    timeout, connector = aiohttp.ClientTimeout(240), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tasks = [asyncio.create_task(watch(session, port, n, seen)) for n, seen in enumerate(streams)]
        half = KILLED_STREAMS * KILLED_TOKENS // 2
        while victim is not None and sum(len(seen.tokens) for seen in streams) < half:
            await asyncio.sleep(0.01)
        if victim is not None:
            for process in [*psutil.Process(victim.pid).children(recursive=True), psutil.Process(victim.pid)]:
                process.kill()
        await asyncio.gather(*tasks)
    return streams


def killed(options: argparse.Namespace) -> dict[str, Any]:
    with servers(4, f"--fake-step-ms={STEP_MS}", model=options.model_id) as found:
        ports = [port for port, _ in found]
        expected = [seen.tokens for seen in asyncio.run(many(ports[0]))]
        with balancer(ports) as (routed, _):
            streams = asyncio.run(many(routed, found[1][1]))
            moves = metric(routed, "legato_route_moves")
    complete = list(range(1, KILLED_TOKENS + 1))
    return {
        "streams": KILLED_STREAMS,
        "tokens_each": KILLED_TOKENS,
        "moved": int(moves),
        "with_every_token_once": sum([index for index, _ in seen.tokens] == complete for seen in streams),
        "equal_to_one_server": sum(seen.tokens == each for seen, each in zip(streams, expected, strict=True)),
        "errors": sum(seen.error is not None for seen in streams),
        "longest_gap_ms": round(max(seen.gap for seen in streams) * 1000),
    }


SCENARIOS = {"overhead": overhead, "scaling": scaling, "conversations": conversations, "killed": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description="The balancer, with fake shards.")
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], help="which to run; all by default")
    parser.add_argument("--model-id", help="whose tokenizer to use; the default model's by default")
    parser.add_argument("--rounds", type=int, default=5, help="length of the measurements of speed")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON; scenarios that are there stay")
    options = parser.parse_args()
    figures = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in options.scenarios or SCENARIOS:
        figures[name] = SCENARIOS[name](options)
        print(name, json.dumps(figures[name]), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({**figures, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
