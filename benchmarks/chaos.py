"""Processes of a server are killed and stopped at random while clients use it.

    python -m benchmarks.chaos --kills 500 --stops 100 --out benchmarks/results/chaos.json

Every stream must end as if nothing had happened, or with a typed error. It may break off only if its HTTP worker or
its router was hit. Exits with 1 if a stream ended otherwise, if the server was not ready again within 10 seconds, or if
it left anything behind.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mixed_load import OPTIONS, REQUEST_SECONDS, Reply, Server, ask, expected_replies, requests, until
from benchmarks.processes import launched, leave_nothing_behind
from legato.benchmark.report import environment, percentile

HANG_TIMEOUT = 2.0
LOAD_TIMEOUT = 4.0
# From a signal until tokens come again, the time in which a hang is noticed included.
RECOVERY_SECONDS = 10.0
# What is waited for a recovery: far more than it may take.
READY_SECONDS = 60.0


@dataclass
class Load:
    """Clients that ask again and again, and compare."""

    port: int
    expected: dict[int, set[Reply]]
    asked: list[tuple[str, dict[str, Any]]]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    # When a process was hit that clients are connected to, directly or not.
    cuts: list[float] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.is_set():
            number = rng.randrange(len(self.asked))
            began = time.monotonic()
            try:
                reply = ask(self.port, *self.asked[number])
            except TimeoutError:
                self.outcomes["hung"] += 1
                self.wrong.append({"request": number, "hung": True})
                continue
            self._judge(number, reply, began)
            if reply.broke_off or reply.error_type is not None:
                time.sleep(0.2)  # as a client that tries again

    def _judge(self, number: int, reply: Reply, began: float) -> None:
        if reply in self.expected[number]:
            self.outcomes["equal"] += 1
        elif reply.error_type is not None:
            self.outcomes[f"typed: {reply.error_type}"] += 1
        elif reply.broke_off:
            was_hit = any(cut > began - READY_SECONDS for cut in self.cuts)
            how = "refused" if reply.refused else "broke off"
            self.outcomes[f"{how} with its process" if was_hit else how] += 1
            if not was_hit:
                self.wrong.append({"request": number, "broke_off": True})
        else:
            self.outcomes["different"] += 1
            self.wrong.append({"request": number, "expected": str(self.expected[number]), "found": str(reply)})

    def stop(self) -> None:
        self._stopping.set()


def hit(server: Server, load: Load, number: signal.Signals, rng: random.Random) -> dict[str, Any]:
    """Signal a random process and wait until another has its place. Seconds are None if that never happened."""
    role = rng.choice(["shard", "shard", "router", "worker"])
    target = rng.choice(server.processes()[role])
    began = time.monotonic()
    if role != "shard":
        load.cuts.append(began)
    target.send_signal(number)

    def is_replaced() -> bool:
        try:
            gone = not target.is_running() or target.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        return gone and server.is_complete() and server.generates()

    replaced = until(is_replaced, READY_SECONDS)
    if role != "shard":
        load.cuts.append(time.monotonic())
    return {"role": role, "signal": number.name, "seconds": time.monotonic() - began if replaced else None}


def schedule(kills: int, stops: int, rng: random.Random) -> Iterator[signal.Signals]:
    signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    rng.shuffle(signals)
    yield from signals


def summary(hits: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    figures = {}
    for name in ("SIGKILL", "SIGSTOP"):
        for role in ("shard", "router", "worker"):
            times = sorted(
                each["seconds"] for each in hits if (each["signal"], each["role"]) == (name, role) and each["seconds"]
            )
            if times:
                p50, p99 = percentile(times, 50), percentile(times, 99)
                figures[f"{name} {role}"] = {"count": len(times), "p50": p50, "p99": p99, "max": times[-1]}
    return figures


def run(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    words = [*OPTIONS, f"--hang-timeout={HANG_TIMEOUT:g}", f"--load-timeout={LOAD_TIMEOUT:g}", "--max-restarts=1000000"]
    words += [f"--model-id={options.model_id}"] if options.model_id else []
    with launched(*words, *options.extra) as (port, launcher):
        server = Server(port, launcher)
        asked = requests()
        expected = expected_replies(port, asked, options.clients)
        unstable = sum(len(each) > 1 for each in expected.values())
        print(f"{len(asked)} requests, {unstable} of which differ without faults", file=sys.stderr, flush=True)
        load = Load(port, expected, asked)
        clients = [threading.Thread(target=load.run, args=(seed,), daemon=True) for seed in range(options.clients)]
        for client in clients:
            client.start()
        memory = [server.memory_mb()]
        hits = []
        for count, number in enumerate(schedule(options.kills, options.stops, rng)):
            time.sleep(rng.uniform(0.2, options.pause))
            hits.append(hit(server, load, number, rng))
            print(count, hits[-1], dict(load.outcomes), file=sys.stderr, flush=True)
            if hits[-1]["seconds"] is None:
                break
            if count % 50 == 49:
                memory.append(server.memory_mb())
        load.stop()
        for client in clients:
            client.join(REQUEST_SECONDS)
        memory.append(server.memory_mb())
        ours = psutil.Process(launcher.pid).children(recursive=True)
    _, orphans = psutil.wait_procs(ours, timeout=10)
    return {
        "environment": environment(),
        "hang_timeout": HANG_TIMEOUT,
        "load_timeout": LOAD_TIMEOUT,
        "exit_code": launcher.returncode,
        "seconds_until_ready": summary(hits),
        "never_ready": sum(each["seconds"] is None for each in hits),
        "late": sum((each["seconds"] or 0.0) > RECOVERY_SECONDS for each in hits),
        "outcomes": dict(load.outcomes),
        "wrong": load.wrong[:20],
        "num_wrong": len(load.wrong),
        "orphans": len(orphans),
        "memory_mb": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs to send")
    parser.add_argument("--stops", type=int, default=100, help="SIGSTOPs to send")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--pause", type=float, default=3.0, help="longest time between a recovery and the next signal")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-id", help="default: that of the launcher")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("extra", nargs="*", help="more options of the launcher, after --")
    options = parser.parse_args()
    leave_nothing_behind()
    figures = run(options)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")
    failures = ("num_wrong", "never_ready", "late", "orphans", "exit_code")
    sys.exit(1 if any(figures[name] for name in failures) else 0)


if __name__ == "__main__":
    main()
