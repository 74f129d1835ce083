"""A server under mixed load for a long time: whether memory, descriptors, blocks, answers and speed stay as they are.

    python -m benchmarks.soak --minutes 60 --out benchmarks/results/soak.json

Streams and whole answers of all kinds, grammars, long prompts and priorities, clients that hang up, and requests that
must be refused. A line a minute. Exits with 1 if memory grows, if descriptors or blocks are not given back, if anything
was answered with 5xx or otherwise than it should be, or if a greedy text differs from the one before the load.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.mixed_load import (
    OPTIONS,
    PROMPTS,
    REQUEST_SECONDS,
    Reply,
    Server,
    anonymous_mb,
    ask,
    expected_replies,
    generate,
    requests,
    until,
)
from benchmarks.processes import HOST, launched, leave_nothing_behind
from legato.benchmark.report import environment, percentile, write_json
from legato.modelfiles.shapes import write_shape

SAMPLE_SECONDS = 60.0
MOST_SAMPLES_OF_A_SHORT_RUN = 12
# The share of samples at the beginning in which caches and allocators still fill.
WARM_UP = 0.25
# What a role may grow by between the first and the last third of the samples after that. A shorter run is all warm-up.
GROWTH_MB, GROWTH_MB_PER_REQUEST = 8.0, 1 / 10_000
MINUTES_TO_JUDGE_MEMORY = 10.0
# Of all processes together: gRPC and thread pools open some when they are first needed.
MORE_DESCRIPTORS = 4
DRAIN_SECONDS = 60.0
# How often each kind of client comes.
KINDS = {"compares": 12, "hangs up": 4, "is refused": 3, "looks": 1}

BAD: list[tuple[str, bytes, int]] = [
    ("/generate", b'{"inputs":', 400),
    ("/generate", b'{"inputs": "a", "parameters": {"temperature": -1}}', 422),
    ("/generate_stream", b'{"inputs": "a", "parameters": {"max_new_tokens": 0}}', 200),  # the error is an event
    ("/generate", b'{"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}}', 422),
    ("/v1/completions", b'{"prompt": "a", "n": 100000}', 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/nowhere", b"{}", 404),
]
# The shape has no template of its own.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def mixed_requests() -> list[tuple[str, dict[str, Any]]]:
    priorities = (0, 5, 9)
    return [
        *requests(),
        *(generate(f"{prompt}, " * 60, priority=each) for prompt, each in zip(PROMPTS, priorities, strict=True)),
    ]


def is_greedy(body: dict[str, Any]) -> bool:
    parameters = body.get("parameters", body)
    return not parameters.get("do_sample") and not parameters.get("temperature")


@dataclass
class Load:
    port: int
    asked: list[tuple[str, dict[str, Any]]]
    expected: dict[int, set[Reply]]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    # The longest time that a client thinks between two requests.
    pause: float = 0.0
    # Seconds of every answer since the last sample.
    latencies: list[float] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        kinds, weights = [*KINDS], [*KINDS.values()]
        while not self._stopping.is_set():
            kind = rng.choices(kinds, weights)[0]
            try:
                getattr(self, "_" + kind.replace(" ", "_"))(rng)
            except (OSError, http.client.HTTPException) as error:
                self._blame(kind, f"{type(error).__name__}: {error}")
            self._stopping.wait(rng.uniform(0.0, self.pause))

    def stop(self) -> None:
        self._stopping.set()

    def _blame(self, kind: str, problem: str) -> None:
        self.outcomes["wrong"] += 1
        self.wrong.append({"client": kind, "problem": problem})

    def _compares(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.asked))
        path, body = self.asked[number]
        began = time.monotonic()
        reply = ask(self.port, path, body)
        self.latencies.append(time.monotonic() - began)
        if reply in self.expected[number]:
            self.outcomes["equal"] += 1
        elif reply.texts and not is_greedy(body):
            self.outcomes["sampled, another text"] += 1
        else:
            self._blame("compares", f"request {number}: {reply}, expected {self.expected[number]}")

    def _hangs_up(self, rng: random.Random) -> None:
        path, body = self.asked[rng.randrange(len(self.asked))]
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        time.sleep(rng.random())
        connection.close()
        self.outcomes["hung up"] += 1

    def _is_refused(self, rng: random.Random) -> None:
        path, body, expected = rng.choice(BAD)
        self._answered("is refused", "POST", path, body, expected)

    def _looks(self, rng: random.Random) -> None:
        self._answered("looks", "GET", rng.choice(["/health", "/info", "/metrics", "/v1/models"]), None, 200)

    def _answered(self, kind: str, method: str, path: str, body: bytes | None, expected: int) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        self.outcomes[f"{response.status}"] += 1
        if response.status != expected:
            self._blame(kind, f"{method} {path}: {response.status}, expected {expected}")


@dataclass(frozen=True)
class Sample:
    minute: float
    requests: int
    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    kv_usage: float
    # By role.
    memory_mb: dict[str, float]
    descriptors: dict[str, int]
    sockets: dict[str, int]
    threads: dict[str, int]

    @property
    def line(self) -> str:
        per_role = ", ".join(
            f"{role} {mb:.1f} MB {self.descriptors[role]} fds {self.sockets[role]} sockets {self.threads[role]} threads"
            for role, mb in self.memory_mb.items()
        )
        return (
            f"minute {self.minute:.1f}: {self.requests} requests, {self.tokens_per_second:.1f} tok/s,"
            f" p50 {self.latency_p50:.2f} s, p99 {self.latency_p99:.2f} s, KV {self.kv_usage:.1%}; {per_role}"
        )


class Sampler:
    def __init__(self, server: Server, load: Load) -> None:
        self._server = server
        self._load = load
        self._began = self._last = time.monotonic()
        self._num_tokens = self._generated()

    def _generated(self) -> float:
        return self._server.metric("tgi_request_generated_tokens_sum")

    def take(self) -> Sample:
        now, num_tokens = time.monotonic(), self._generated()
        latencies, self._load.latencies = sorted(self._load.latencies) or [0.0], []
        rate = (num_tokens - self._num_tokens) / max(now - self._last, 1e-9)
        self._last, self._num_tokens = now, num_tokens
        roles = self._server.all_processes()
        return Sample(
            minute=(now - self._began) / 60,
            requests=sum(self._load.outcomes.values()),
            tokens_per_second=rate,
            latency_p50=percentile(latencies, 50),
            latency_p99=percentile(latencies, 99),
            kv_usage=self._server.metric("legato_kv_usage"),
            memory_mb={role: sum(map(anonymous_mb, members)) for role, members in roles.items()},
            descriptors={role: sum(each.num_fds() for each in members) for role, members in roles.items()},
            sockets={role: sum(map(num_sockets, members)) for role, members in roles.items()},
            threads={role: sum(each.num_threads() for each in members) for role, members in roles.items()},
        )


def num_sockets(process: psutil.Process) -> int:
    found = 0
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def growth_mb(samples: Sequence[Sample]) -> dict[str, float]:
    """By role: how much more the last third of the samples has than the first, without the warm-up."""
    kept = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(kept) // 3)
    return {
        role: median(each.memory_mb[role] for each in kept[-third:])
        - median(each.memory_mb[role] for each in kept[:third])
        for role in samples[0].memory_mb
    }


def problems(before: Sample, samples: Sequence[Sample], drained: Sample, wrong: Sequence[dict[str, Any]]) -> list[str]:
    """`before` and `drained` were taken without load, the other samples under load."""
    found = [f"{each['client']}: {each['problem']}" for each in wrong[:20]]
    limit = GROWTH_MB + GROWTH_MB_PER_REQUEST * samples[-1].requests
    found += [
        f"memory of {role} grew by {mb:.1f} MB, more than {limit:.1f}"
        for role, mb in growth_mb(samples).items()
        if mb > limit and samples[-1].minute >= MINUTES_TO_JUDGE_MEMORY
    ]
    if any(now.requests == earlier.requests for earlier, now in pairwise([before, *samples])):
        found.append("nothing was answered between two samples")
    more = sum(drained.descriptors.values()) - sum(before.descriptors.values())
    if more > MORE_DESCRIPTORS:
        found.append(f"{more} descriptors more than before the load: {before.descriptors}, now {drained.descriptors}")
    if drained.kv_usage:
        found.append(f"{drained.kv_usage:.1%} of the KV blocks are in use without requests")
    return found


@contextmanager
def model_words(options: argparse.Namespace) -> Iterator[list[str]]:
    if not options.tiny:
        yield [f"--model-id={options.model_id}"] if options.model_id else []
        return
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape("tiny", Path(name) / "tiny")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        yield [f"--model-id={folder}", "--load-format=dummy"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    with model_words(options) as model, launched(*OPTIONS, *model, *options.extra) as (port, launcher):
        server = Server(port, launcher)

        def is_idle() -> bool:
            return not any(map(server.metric, ("tgi_batch_current_size", "tgi_queue_size", "legato_kv_usage")))

        asked = mixed_requests()
        load = Load(port, asked, expected_replies(port, asked, options.clients), pause=options.pause)
        until(is_idle, DRAIN_SECONDS)
        sampler = Sampler(server, load)
        before = sampler.take()
        print(f"before the load: {before.line}", flush=True)
        clients = [threading.Thread(target=load.run, args=(seed,), daemon=True) for seed in range(options.clients)]
        for client in clients:
            client.start()
        samples = []
        seconds = options.minutes * 60
        pause = min(SAMPLE_SECONDS, seconds / MOST_SAMPLES_OF_A_SHORT_RUN)
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at and len(load.wrong) < 100:
            time.sleep(pause)
            samples.append(sampler.take())
            print(samples[-1].line, flush=True)
        load.stop()
        for client in clients:
            client.join(REQUEST_SECONDS)
        hung = sum(client.is_alive() for client in clients)
        is_drained = until(is_idle, DRAIN_SECONDS)
        until(lambda: sum(sampler.take().descriptors.values()) <= sum(before.descriptors.values()), MORE_DESCRIPTORS)
        drained = sampler.take()
        print(f"drained: {drained.line}", flush=True)
        restarts = sum(server.metric(f'legato_restarts{{process="{each}"}}') for each in ("shard", "http_worker"))
    found = problems(before, samples, drained, load.wrong)
    found += [f"{hung} clients are still waiting"] if hung else []
    found += [] if is_drained else [f"requests run or wait {DRAIN_SECONDS:g} s after the last client has left"]
    found += [f"{restarts:.0f} processes were restarted"] if restarts else []
    found += [f"the launcher ended with code {launcher.returncode}"] if launcher.returncode else []
    return {
        "environment": environment(),
        "minutes": options.minutes,
        "clients": options.clients,
        "pause": options.pause,
        "outcomes": dict(load.outcomes),
        "growth_mb": growth_mb(samples),
        "problems": found,
        "samples": [vars(each) for each in (before, *samples, drained)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="longest time between two requests of a client")
    parser.add_argument("--model-id", help="default: that of the launcher")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape with made-up weights instead of a model")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("extra", nargs="*", help="more options of the launcher, after --")
    options = parser.parse_args()
    leave_nothing_behind()
    figures = run(options)
    if options.out:
        write_json(options.out, figures)
    if options.minutes < MINUTES_TO_JUDGE_MEMORY:
        print(f"memory is not judged in less than {MINUTES_TO_JUDGE_MEMORY:g} minutes")
    print(json.dumps({name: figures[name] for name in ("outcomes", "growth_mb", "problems")}, indent=1))
    sys.exit(1 if figures["problems"] else 0)


if __name__ == "__main__":
    main()
