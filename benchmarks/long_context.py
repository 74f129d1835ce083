"""Long prompts, decodes over long contexts, small batches and the first seconds, of Legato and, where it is, of vLLM.

    python -m benchmarks.long_context --vllm-path SITE --json benchmarks/results/long-context.json

Cases are in `long_cases.py`. A first shard starts with an empty compile cache and answers one token; a second one finds
what the first compiled, and runs the cases once its CUDA graphs are captured. Then vLLM does the same work, if
`--vllm-path` has it, folders as in PYTHONPATH, or this environment. The table comes last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.beside_vllm import has_vllm
from benchmarks.long_cases import LONGEST, Case, chosen, collected, runs
from benchmarks.processes import BenchmarkFailed, figures_of, leave_nothing_behind
from legato.benchmark.engine.cli import PROBE
from legato.benchmark.engine.session import Session, connect, opened
from legato.benchmark.engine.soak import wait_for_captures
from legato.benchmark.engine.workloads import Scale
from legato.benchmark.report import environment, markdown, write_json
from legato.benchmark.shard import ShardProcess, spawned
from legato.common.options import RouterOptions
from legato.common.progress import WARMED_UP
from legato.modelfiles.shapes import SHAPES
from legato.telemetry.metrics import StepFigures

MAX_ROWS = 512  # as `legato bench engine` has it
FORMATS = {"seconds": "{:.2f} s", "out_per_second": "{:,.0f} tok/s", "step_ms": "{:.2f} ms a step"}


def shown(step: StepFigures) -> list[float]:
    """Tokens, rows, and milliseconds on the device, beside it in the shard, and of the plan."""
    times = (step.forward_time, step.decode_time, step.planning_time)
    return [step.num_computed, step.batch_size, *(round(1e3 * seconds, 2) for seconds in times)]


async def measure(session: Session, case: Case, scale: Scale) -> dict[str, Any]:
    """With the steps of the last run, where these have prompts to compute beside decodes."""
    scheduler = session.scheduler(prefix_caching=True) if case.figure == "step_ms" else None
    seconds: list[float] = []
    steps: list[StepFigures] = []
    for workload in runs(case, scale):
        steps.clear()
        figures = await session.run(workload, scheduler, steps.append)
        seconds.append(figures.seconds)
    found = collected(case, seconds, scale)
    return found | {"steps": [shown(step) for step in steps]} if case.figure == "seconds" else found


async def benchmark(shard: ShardProcess, cases: Sequence[Case], divisor: int, started: float) -> dict[str, Any]:
    """Without cases: only the time to the first token."""
    shards, info = await connect(shard)

    async def num_uncaptured() -> int:
        return (await shards.info()).num_uncaptured

    tokens = max((case.num_tokens for case in chosen("")), default=LONGEST) // divisor
    longest = LONGEST // divisor
    options = RouterOptions(
        max_concurrent_requests=MAX_ROWS,
        max_batch_size=MAX_ROWS,
        max_total_tokens=longest,
        max_batch_total_tokens=max(tokens, longest),
    )
    try:
        async with opened(shards, info, options) as session:
            await session.run(PROBE)
            figures: dict[str, Any] = {"first_token_seconds": time.perf_counter() - started}
            if cases:
                await wait_for_captures(num_uncaptured)
                figures["captured_seconds"] = time.perf_counter() - started
            results = {}
            for case in cases:
                results[case.name] = await measure(session, case, Scale(divisor, info.vocab_size))
                print(case.name, {k: v for k, v in results[case.name].items() if k != "steps"}, flush=True)
            return figures | {"workloads": results}
    finally:
        await shards.close()


def in_legato(model: str, cases: Sequence[Case], divisor: int, arguments: Sequence[str]) -> dict[str, Any]:
    import uvloop  # the loop that the router runs on

    began, started = datetime.now(UTC), time.perf_counter()
    with spawned(model, arguments) as shard:
        figures: dict[str, Any] = uvloop.run(benchmark(shard, cases, divisor, started))
        assert shard._log is not None
        lines = shard._log.read_text().splitlines()
    # Until the first token, with the time of each line.
    last = next((number for number, line in enumerate(lines) if WARMED_UP in line), len(lines) - 1)
    figures["log"] = [f"{began.isoformat()} command", *lines[: last + 1]]
    print("\n".join(figures["log"]), flush=True)
    return figures


def started_once(model: str, cases: Sequence[Case], divisor: int, arguments: Sequence[str]) -> dict[str, Any]:
    """With the compile cache as it is."""
    figures = in_legato(model, cases, divisor, arguments)
    return {"first_token_cold_seconds": figures["first_token_seconds"], **figures}


def started_twice(model: str, cases: Sequence[Case], divisor: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The first time with an empty compile cache. Libraries have been read from disk before."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, triton, triton.experimental.gluon"], check=True)
    imported = time.perf_counter() - began
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            cold = in_legato(model, [], divisor, arguments)
            print(f"first token after {cold['first_token_seconds']:.1f} s, empty compile cache", flush=True)
            figures = in_legato(model, cases, divisor, arguments)
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before
    starts = {"first_token_cold_seconds": cold["first_token_seconds"], "log_cold": cold["log"]}
    return {"libraries_read_seconds": imported, **starts, **figures}


def value(figures: dict[str, Any], case: Case) -> str:
    return FORMATS[case.figure].format(figures["workloads"][case.name][case.figure])


def ratio(ours: dict[str, Any], theirs: dict[str, Any], case: Case) -> str:
    """Above one Legato is faster."""
    mine, other = (float(each["workloads"][case.name][case.figure]) for each in (ours, theirs))
    return f"{mine / other if case.figure == 'out_per_second' else other / mine:.3f}"


def table(ours: dict[str, Any], theirs: dict[str, Any] | None, cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        beside = ("", "") if theirs is None else (value(theirs, case), ratio(ours, theirs, case))
        rows.append([case.name, value(ours, case), *beside])
    cold, warm = ours["first_token_cold_seconds"], ours["first_token_seconds"]
    start = "" if theirs is None else f"{theirs['first_token_seconds']:.1f} s"
    rows.append(["first token, cold / warm compile cache", f"{cold:.1f} / {warm:.1f} s", start, ""])
    return markdown(("", "Legato", "vLLM", "times as fast"), rows)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--cases", default="", help="beginnings of their names, separated by semicolons; default: all")
    parser.add_argument("--scale", type=int, default=1, help="divide the workloads by this")
    parser.add_argument("--vllm-path", default="", help="folders to look for vLLM in, as in PYTHONPATH")
    parser.add_argument("--without-vllm", action="store_true", help="even if it is there")
    parser.add_argument("--start-once", action="store_true", help="leave out the shard that only answers one token")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("shard_arguments", nargs="*", help="behind --, for Legato's shard")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    given = parsed(words)
    cases = chosen(given.cases)
    around = environment()
    start = started_once if given.start_once else started_twice
    ours, theirs = start(given.model, cases, given.scale, given.shard_arguments), None
    figures: dict[str, Any] = {**around, "legato_figures": ours}
    paths = os.pathsep.join(path for path in (given.vllm_path, os.environ.get("PYTHONPATH", "")) if path)
    variables = os.environ | {"PYTHONPATH": paths}
    if not given.without_vllm and has_vllm(variables):
        work = ["-m", "benchmarks.in_vllm", f"--model={given.model}", f"--scale={given.scale}", f"--long={given.cases}"]
        try:
            figures["vllm_figures"] = theirs = figures_of(work, variables)
        except BenchmarkFailed as error:
            print(f"error: vLLM: {error}", file=sys.stderr)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.json, figures)
    print(table(ours, theirs, cases))
    return 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
