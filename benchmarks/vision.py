"""Chats with pictures: Legato, vLLM and Legato again, one after the other on the same device.

    python -m benchmarks.vision --vllm-path SITE --out benchmarks/results/vision.json
    python -m benchmarks.vision --alone

32 requests at once, each with one picture of 1,024×1,024 and 128 tokens out, on the shape of Qwen2.5-VL 7B: tokens a
second, and time to the first token. Legato is measured over HTTP (`benchmarks/vision_over_http.py`), vLLM in process
(`benchmarks/vision_in_vllm.py`), from `--vllm-path`, folders as in PYTHONPATH, if this environment does not have it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside_vllm import has_vllm
from benchmarks.processes import BenchmarkFailed, figures_of, leave_nothing_behind
from benchmarks.vision_work import add_arguments
from legato.benchmark.report import environment, markdown

HEADER = ("Engine", "Tok/s out", "TTFT p50 ms", "p95", "Seconds", "First answer after, s")

Benchmark = Callable[[Sequence[str], Mapping[str, str] | None], dict[str, Any]]


def row(engine: str, figures: dict[str, Any]) -> list[str]:
    best = figures["best"]
    numbers = (best["out_per_second"], best["ttft_ms"]["p50"], best["ttft_ms"]["p95"])
    return [engine, *(f"{number:,.1f}" for number in numbers), f"{best['seconds']:.3f}"] + [
        f"{figures['first_token_seconds']:.1f}"
    ]


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Above 1 Legato is better: the better of its two turns over vLLM."""
    ours, theirs = (figures["legato"]["best"], figures["legato_again"]["best"]), figures["vllm"]["best"]
    return {
        "out_per_second": max(turn["out_per_second"] for turn in ours) / theirs["out_per_second"],
        "ttft_p50": theirs["ttft_ms"]["p50"] / min(turn["ttft_ms"]["p50"] for turn in ours),
    }


def check_same_work(figures: dict[str, dict[str, Any]]) -> None:
    counts = {engine: (measured["best"]["num_in"], measured["best"]["num_out"]) for engine, measured in figures.items()}
    # The best run may be another one, and the texts of two runs may differ by a few tokens.
    lowest, highest = min(counts.values()), max(counts.values())
    if highest[1] != lowest[1] or highest[0] > 1.01 * lowest[0]:
        raise BenchmarkFailed(f"the engines did not do the same work: tokens in and out {counts}")


def main(words: Sequence[str] | None = None, benchmark: Benchmark = figures_of) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--alone", action="store_true", help="Legato alone, once")
    parser.add_argument("--vllm-path", default="", help="folders to look for vLLM in, as in PYTHONPATH")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    given = parser.parse_args(words)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    work = [f"--{name}={getattr(given, name)}" for name in ("model", "requests", "side", "new", "repeat")]
    paths = os.pathsep.join(path for path in (given.vllm_path, os.environ.get("PYTHONPATH", "")) if path)
    theirs = os.environ | {"PYTHONPATH": paths}
    if not given.alone and not has_vllm(theirs):
        parser.error("vLLM is not in this environment: install it, say with --vllm-path where it lies, or use --alone")
    ours = (["-m", "benchmarks.vision_over_http", *work], None)
    turns: dict[str, tuple[list[str], Mapping[str, str] | None]] = {"legato": ours}
    if not given.alone:
        turns |= {"vllm": (["-m", "benchmarks.vision_in_vllm", *work], theirs), "legato_again": ours}
    report: dict[str, Any] = {**environment(), "work": {word.partition("=")[0][2:]: word.partition("=")[2] for word in work}}
    figures: dict[str, dict[str, Any]] = {}
    try:
        for engine, (program, variables) in turns.items():
            print(f"{engine}:", file=sys.stderr, flush=True)
            figures[engine] = benchmark(program, variables)
        check_same_work(figures)
    except BenchmarkFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(HEADER, [row(engine, measured) for engine, measured in figures.items()]))
    if not given.alone:
        report["ratios"] = ratios(figures)
        print("\nLegato / vLLM: " + ", ".join(f"{name} {value:.3f}" for name, value in report["ratios"].items()))
    if given.out is not None:
        given.out.write_text(json.dumps(report | {"engines": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
