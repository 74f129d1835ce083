"""Legato, vLLM and Legato again, one after the other on the same device, with the same work.

    python -m benchmarks.beside_vllm --vllm-path SITE --out benchmarks/results/beside-vllm.json

Two cards of a kind differ by several percent, and one card by how warm it is, so figures from different days say little
about who is faster. Legato runs as in `legato bench engine`, its shard behind gRPC and the router's scheduler in front,
vLLM in process (`benchmarks/in_vllm.py`). vLLM comes from `--vllm-path`, folders as in PYTHONPATH, if this environment
does not have it: the two need not get on with each other's dependencies.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkFailed, figures_of, leave_nothing_behind
from legato.benchmark.report import environment, markdown, write_json
from legato.modelfiles.shapes import SHAPES

HEADER = ("Workload", "Tok/s", "Legato", "vLLM", "Legato again", "Best Legato / best vLLM")
# What is counted: workloads of long prompts are about reading, the others about writing.
READING = ("G3",)

Benchmark = Callable[[Sequence[str], Mapping[str, str] | None], dict[str, Any]]


def rate(figures: dict[str, Any], name: str) -> float:
    """The best run's tokens a second, of the kind that the workload is about."""
    return float(figures["workloads"][name]["best"]["in_per_second" if name in READING else "out_per_second"])


def ratio(figures: dict[str, dict[str, Any]], name: str) -> float:
    ours = max(rate(figures["legato"], name), rate(figures["legato_again"], name))
    return ours / rate(figures["vllm"], name)


def table(figures: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    rows = [
        [
            name,
            "in" if name in READING else "out",
            *(f"{rate(figures[engine], name):,.1f}" for engine in ("legato", "vllm", "legato_again")),
            f"{ratio(figures, name):.3f}",
        ]
        for name in names
    ]
    return markdown(HEADER, rows)


def has_vllm(environment: Mapping[str, str]) -> bool:
    """Asked of a process of its own, which does not import it: that would take seconds."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([sys.executable, "-c", question], env=environment, check=False).returncode == 0


def report(around: dict[str, Any], ratios: dict[str, float], figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Circumstances are those of all three, and told once."""
    engines = {
        engine: {key: value for key, value in measured.items() if key not in around}
        for engine, measured in figures.items()
    }
    return {**around, "ratios": ratios, "engines": engines}


def main(words: Sequence[str] | None = None, benchmark: Benchmark = figures_of) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--workload", default="G1,G2,G3,G4", help="separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("--scale", type=int, default=1, help="divide the workloads by this")
    parser.add_argument("--vllm-path", default="", help="folders to look for vLLM in, as in PYTHONPATH")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    given = parser.parse_args(words)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    work = [f"--model={given.model}", f"--workload={given.workload}"]
    work += [f"--repeat={given.repeat}", f"--scale={given.scale}"]
    paths = os.pathsep.join(path for path in (given.vllm_path, os.environ.get("PYTHONPATH", "")) if path)
    theirs = os.environ | {"PYTHONPATH": paths}
    if not has_vllm(theirs):
        parser.error("vLLM is not in this environment: install it, or say with --vllm-path where it lies")
    turns: list[tuple[str, list[str], Mapping[str, str] | None]] = [
        ("legato", ["-m", "legato.cli", "bench", "engine", *work], None),
        ("vllm", ["-m", "benchmarks.in_vllm", *work], theirs),
        ("legato_again", ["-m", "legato.cli", "bench", "engine", *work], None),
    ]
    around, figures = environment(), {}
    for engine, program, variables in turns:
        print(f"{engine}:", file=sys.stderr, flush=True)
        try:
            figures[engine] = benchmark(program, variables)
        except BenchmarkFailed as error:
            print(f"error: {engine}: {error}", file=sys.stderr)
            return 1
    names = given.workload.split(",")
    print(table(figures, names))
    starts = {engine: figures[engine]["first_token_seconds"] for engine in figures}
    print("\nFirst token after: " + ", ".join(f"{engine} {seconds:.1f} s" for engine, seconds in starts.items()))
    if given.out is not None:
        ratios = {name: ratio(figures, name) for name in names}
        write_json(given.out, report(around, ratios, figures))
    return 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
