"""Processes of a server are killed and stopped at random while clients use it.

    python -m benchmarks.chaos --kills 500 --stops 100 --out benchmarks/results/chaos.json

Every stream must end as if nothing had happened, or with a typed error. It may break off only if its HTTP worker or
its router was hit. Exits with 1 if a stream ended otherwise, if the server was not ready again in time, or if it left
anything behind.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import HOST, launched, leave_nothing_behind
from legato.benchmark.report import environment, percentile

HANG_TIMEOUT = 3.0
# What a restart may take, besides --hang-timeout: far more than it should.
READY_SECONDS = 60.0
REQUEST_SECONDS = 180.0
NUM_WORKERS = 2
MAX_NEW_TOKENS = 48
OPTIONS = (
    f"--http-workers={NUM_WORKERS}",
    f"--hang-timeout={HANG_TIMEOUT:g}",
    "--max-restarts=1000000",
    "--max-best-of=4",
    "--logger-level=error",
)
PROMPTS = [f"The number {number} is known for" for number in range(3)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 1}},
    "required": ["name", "age"],
}


def generate(prompt: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": MAX_NEW_TOKENS, **parameters}}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """One of each kind for every prompt."""
    found = []
    for seed, prompt in enumerate(PROMPTS):
        sampled = {"do_sample": True, "temperature": 0.8, "seed": seed}
        several = {"prompt": prompt, "max_tokens": MAX_NEW_TOKENS, "n": 2, "temperature": 0.8, "seed": seed}
        messages = [{"role": "user", "content": prompt}]
        chat = {"messages": messages, "max_tokens": MAX_NEW_TOKENS, "stream": True, "logprobs": True}
        found += [
            generate(prompt),
            generate(prompt, **sampled, repetition_penalty=1.2, frequency_penalty=0.2),
            generate(prompt, top_n_tokens=3, decoder_input_details=False),
            generate(prompt, grammar={"type": "json", "value": SCHEMA}),
            generate(prompt, stop=["the the", "\n\n\n"]),
            ("/v1/completions", several),
            ("/v1/chat/completions", chat),
        ]
    return found


@dataclass(frozen=True)
class Reply:
    """The texts of all choices, a typed error, or neither if the connection broke off."""

    texts: tuple[str, ...] = ()
    error_type: str | None = None
    broke_off: bool = False
    refused: bool = False


def ask(port: int, path: str, body: dict[str, Any]) -> Reply:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError):
            raise
        return Reply(broke_off=True, refused=isinstance(error, ConnectionRefusedError))
    finally:
        connection.close()
    if response.getheader("content-type", "").startswith("text/event-stream"):
        return read_events(data)
    answer = json.loads(data)
    if "error_type" in answer:
        return Reply(error_type=answer["error_type"])
    return Reply(tuple(choice["text"] for choice in answer["choices"]))


def read_events(data: bytes) -> Reply:
    events = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
    parsed = [json.loads(event) for event in events if event != b"[DONE]"]
    if not parsed:
        return Reply(broke_off=True)
    last = parsed[-1]
    if "error_type" in last:
        return Reply(error_type=last["error_type"])
    if "token" in last:  # TGI's stream: the last event has the whole text, which must be that of the tokens
        text = last["generated_text"]
        return Reply(broke_off=True) if text is None else Reply((text,))
    if b"[DONE]" not in events:
        return Reply(broke_off=True)
    return Reply(("".join(event["choices"][0]["delta"].get("content") or "" for event in parsed if event["choices"]),))


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


class Server:
    def __init__(self, port: int, launcher: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._launcher = psutil.Process(launcher.pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {"shard": [], "router": [], "worker": []}
        for child in self._launcher.children(recursive=True):
            try:
                words = child.cmdline()
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
            except psutil.NoSuchProcess:
                continue
            if "serve" in words:
                found["shard"].append(child)
            elif "legato.http.worker" in words:
                found["worker"].append(child)
            elif any(word.startswith("--master-shard-uds-path") for word in words):
                found["router"].append(child)
        return found

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def is_complete(self) -> bool:
        found = self.processes()
        return bool(found["shard"] and found["router"]) and len(found["worker"]) == NUM_WORKERS and self.is_ready()

    def memory_mb(self) -> dict[str, float]:
        found = self.processes()
        return {
            "launcher": self._launcher.memory_info().rss / 1e6,
            **{role: sum(each.memory_info().rss for each in members) / 1e6 for role, members in found.items()},
        }


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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
        return gone and server.is_complete()

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
    model = [f"--model-id={options.model_id}"] if options.model_id else []
    with launched(*OPTIONS, *model, *options.extra) as (port, launcher):
        server = Server(port, launcher)
        asked = requests()
        # Twice: what differs without any fault, because sums depend on the neighbours, is not the faults' doing.
        with ThreadPoolExecutor(options.clients) as pool:
            replies = list(pool.map(lambda each: ask(port, *each), asked * 2))
        expected = {number: {replies[number], replies[number + len(asked)]} for number in range(len(asked))}
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
        "exit_code": launcher.returncode,
        "seconds_until_ready": summary(hits),
        "never_ready": sum(each["seconds"] is None for each in hits),
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
    failed = figures["num_wrong"] or figures["never_ready"] or figures["orphans"] or figures["exit_code"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
