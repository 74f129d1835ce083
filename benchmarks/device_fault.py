"""An illegal memory access in a shard while streams run: whether all streams go on, and when the server is ready again.

    python -m benchmarks.device_fault --out benchmarks/results/device-fault-h200-llama-8b.json

Starts `text-generation-launcher` on a shape without weights. Every Python process of the server imports a
`sitecustomize` that this program writes; in the shard it waits for a file and then stores to an address that nobody
has. Without a CUDA device the shard aborts instead. Exits with 1 if a stream broke off, repeated or lost a token, or if
the server was not ready again in time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mixed_load import Server, until
from benchmarks.processes import HOST, launched, leave_nothing_behind
from legato.benchmark.report import environment, percentile
from legato.modelfiles.shapes import SHAPES, write_shape

READY_SECONDS = 20.0
PROMPT_WORDS = 100

# Triton reads the source of a kernel from its file, so the hook is a file with the kernel in it.
HOOK = """
import os, sys, threading, time

def store_anywhere():
    import torch
    if not torch.cuda.is_available():
        os.abort()
    import triton, triton.language as tl
    @triton.jit
    def wild_store(address):
        tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)
    wild_store[(1,)](1 << 46)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    store_anywhere()

if "serve" in sys.orig_argv:
    threading.Thread(target=wait_for, args=(os.environ["BENCHMARK_FAULT_FILE"],), daemon=True).start()
"""


@dataclass
class Stream:
    """What one client saw: token ids, when they came, and how the stream ended."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: str = "broke off"

    def largest_gap(self) -> float:
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)


def follow(port: int, number: int, num_tokens: int) -> Stream:
    words = " ".join(f"{(number * 7919 + position * 104729) % 100_003}" for position in range(PROMPT_WORDS))
    body = {"inputs": words, "parameters": {"max_new_tokens": num_tokens, "details": True}}
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    stream = Stream()
    try:
        connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                take(stream, json.loads(line[5:]))
    except (OSError, http.client.HTTPException) as error:
        stream.ended = type(error).__name__
    finally:
        connection.close()
    return stream


def take(stream: Stream, event: dict[str, Any]) -> None:
    if "error_type" in event:
        stream.ended = event["error_type"]
        return
    stream.ids.append(event["token"]["id"])
    stream.times.append(time.monotonic())
    if event["details"] is not None:
        is_whole = event["details"]["generated_tokens"] == len(stream.ids)
        stream.ended = event["details"]["finish_reason"] if is_whole else "tokens lost or repeated"


def all_streams(port: int, num: int, num_tokens: int) -> list[Stream]:
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda number: follow(port, number, num_tokens), range(num)))


@dataclass
class Fault:
    """Provokes the fault and watches how the server deals with it."""

    server: Server
    file: Path
    after: float
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        shard = self.server.processes()["shard"][0]
        time.sleep(self.after)
        began = time.monotonic()
        self.file.touch()
        died = until(lambda: not shard.is_running() or shard.status() == psutil.STATUS_ZOMBIE, READY_SECONDS)
        self.figures["seconds_until_the_shard_ended"] = time.monotonic() - began if died else None
        ready = until(self.server.is_complete, 3 * READY_SECONDS)
        self.figures["seconds_until_ready"] = time.monotonic() - began if ready else None


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text(HOOK)
        os.environ["BENCHMARK_FAULT_FILE"] = str(place / "fault")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        words = ["--model-id", str(write_shape(given.model, place / "model")), "--load-format", "dummy"]
        words += ["--max-total-tokens", "4096", "--http-workers", "2"]
        began = time.monotonic()
        with launched(*words) as (port, launcher):
            started = time.monotonic() - began
            print(f"up after {started:.1f} s", file=sys.stderr, flush=True)
            undisturbed = all_streams(port, given.streams, given.tokens)
            fault = Fault(Server(port, launcher), place / "fault", given.after)
            watcher = threading.Thread(target=fault.run)
            watcher.start()
            streams = all_streams(port, given.streams, given.tokens)
            watcher.join()
    return {"seconds_to_start": started, **fault.figures, **summary(undisturbed, streams)}


def summary(undisturbed: list[Stream], streams: list[Stream]) -> dict[str, Any]:
    gaps = sorted(stream.largest_gap() for stream in streams)
    return {
        "streams": len(streams),
        "undisturbed": dict(Counter(stream.ended for stream in undisturbed)),
        "ended": dict(Counter(stream.ended for stream in streams)),
        "equal_to_undisturbed": sum(one.ids == other.ids for one, other in zip(undisturbed, streams, strict=True)),
        "pause_p50": percentile(gaps, 50),
        "pause_max": gaps[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument(
        "--after", type=float, default=1.5, help="seconds between the start of the streams and the fault"
    )
    parser.add_argument("--out", type=Path, help="file for the figures")
    given = parser.parse_args()
    leave_nothing_behind()
    figures = {**environment(), "model": given.model, **measure(given)}
    text = json.dumps(figures, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    ready = figures["seconds_until_ready"]
    broken = set(figures["ended"]) - {"length", "eos_token"}
    sys.exit(1 if broken or ready is None or ready > READY_SECONDS else 0)


if __name__ == "__main__":
    main()
