"""Chats with pictures: Legato, vLLM and Legato again, one after the other on the same device.

    python -m benchmarks.vision --vllm-path SITE --out benchmarks/results/vision.json
    python -m benchmarks.vision --alone

32 requests at once, each with one picture of 1,024×1,024 and 128 tokens out, on the shape of Qwen2.5-VL 7B: tokens a
second, and time to the first token. Legato is measured over HTTP (`benchmarks/vision_over_http.py`), vLLM in process
(`benchmarks/vision_in_vllm.py`), from `--vllm-path`, folders as in PYTHONPATH, if this environment does not have it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside_vllm import has_vllm
from benchmarks.processes import BenchmarkFailed, figures_of, leave_nothing_behind
from benchmarks.vision_work import add_arguments
from legato.benchmark.report import environment, markdown, write_json

HEADER = ("Engine", "Tok/s out", "TTFT p50 ms", "p95", "Seconds", "First answer after, s")

Benchmark = Callable[[Sequence[str], Mapping[str, str] | None], dict[str, Any]]


def row(engine: str, figures: dict[str, Any]) -> list[str]:
    best = figures["best"]
    numbers = (best["out_per_second"], best["ttft_ms"]["p50"], best["ttft_ms"]["p95"])
    times = (f"{best['seconds']:.3f}", f"{figures['first_token_seconds']:.1f}")
    return [engine, *(f"{number:,.1f}" for number in numbers), *times]


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Above 1 Legato is better: the better of its two turns over vLLM."""
    ours, theirs = (figures["legato"]["best"], figures["legato_again"]["best"]), figures["vllm"]["best"]
    return {
        "out_per_second": max(turn["out_per_second"] for turn in ours) / theirs["out_per_second"],
        "ttft_p50": theirs["ttft_ms"]["p50"] / min(turn["ttft_ms"]["p50"] for turn in ours),
    }


def is_same_work(figures: dict[str, dict[str, Any]]) -> bool:
    """Whether all engines had as many tokens in and out, run by run."""
    counts = [[(run["num_in"], run["num_out"]) for run in measured["runs"]] for measured in figures.values()]
    return all(count == counts[0] for count in counts)


def measure(words: Sequence[str], theirs: Mapping[str, str] | None, benchmark: Benchmark) -> dict[str, dict[str, Any]]:
    """The figures of all turns. Without variables for vLLM, of Legato alone."""
    ours = (["-m", "benchmarks.vision_over_http", *words], None)
    turns: dict[str, tuple[list[str], Mapping[str, str] | None]] = {"legato": ours}
    if theirs is not None:
        turns |= {"vllm": (["-m", "benchmarks.vision_in_vllm", *words], theirs), "legato_again": ours}
    figures = {}
    for engine, (program, variables) in turns.items():
        print(f"{engine}:", file=sys.stderr, flush=True)
        try:
            figures[engine] = benchmark(program, variables)
        except BenchmarkFailed as error:
            raise BenchmarkFailed(f"{engine}: {error}") from None
    return figures


def main(words: Sequence[str] | None = None, benchmark: Benchmark = figures_of) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--alone", action="store_true", help="Legato alone, once")
    parser.add_argument("--vllm-path", default="", help="folders to look for vLLM in, as in PYTHONPATH")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    given = parser.parse_args(words)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    work = {name: getattr(given, name) for name in ("model", "requests", "side", "new", "repeat")}
    paths = os.pathsep.join(path for path in (given.vllm_path, os.environ.get("PYTHONPATH", "")) if path)
    theirs = None if given.alone else os.environ | {"PYTHONPATH": paths}
    if theirs is not None and not has_vllm(theirs):
        parser.error("vLLM is not in this environment: install it, say with --vllm-path where it lies, or use --alone")
    report: dict[str, Any] = {**environment(), "work": work}
    try:
        figures = measure([f"--{name}={value}" for name, value in work.items()], theirs, benchmark)
    except BenchmarkFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(HEADER, [row(engine, measured) for engine, measured in figures.items()]))
    if theirs is not None:
        report["ratios"] = ratios(figures)
        print("\nLegato / vLLM: " + ", ".join(f"{name} {value:.3f}" for name, value in report["ratios"].items()))
    if given.out is not None:
        write_json(given.out, report | {"engines": figures})
    if not is_same_work(figures):
        print("error: the engines had other numbers of tokens in or out; see num_in and num_out", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
