"""Checks every kernel against float64 and times it on a GPU: `python -m benchmarks.kernels --out kernels.json`.

Times come from CUDA graphs that run all input sets of a case one after another, as a decode step runs its layers, so
they include the gap between two kernels. `--sweep` also tries the candidate configurations of the kernels that have
any, and prints the best ones, for the tables beside the kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_step import step_cases
from benchmarks.kernel_cases import Case, Variant, all_cases, distance
from legato.kernels import overlap


@dataclass(frozen=True)
class Ceilings:
    """Of this machine, measured."""

    bandwidth: float  # bytes/s of a large copy, read and written
    compute: float  # FLOP/s of a large bf16 product


@dataclass(frozen=True)
class Result:
    kernel: str
    shape: str
    variant: str
    microseconds: float
    rate: str
    of_floor: float  # fastest possible time over measured time
    error: float | None  # of the case's first variant
    failed: bool = False
    swept: bool = False


def graph_seconds(variant: Variant) -> float:
    """Median time of one call, in a graph of at least 16."""
    overlap.OVERLAP_LAUNCHES = variant.overlap
    calls = variant.calls * -(-16 // len(variant.calls)) if len(variant.calls) > 1 else variant.calls
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in variant.calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    overlap.OVERLAP_LAUNCHES = False
    graph.replay()
    seconds = [replay_seconds(graph) for _ in range(3)]
    repeats = max(3, min(50, int(0.03 / statistics.median(seconds))))
    return statistics.median(replay_seconds(graph) for _ in range(repeats)) / len(calls)


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def measure_ceilings() -> Ceilings:
    source, target = (torch.randn(1 << 29, device="cuda") for _ in range(2))
    copy = graph_seconds(Variant("copy", [lambda: target.copy_(source), lambda: source.copy_(target)]))
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_seconds(Variant("product", [lambda: a @ b, lambda: b @ a]))
    return Ceilings(2 * source.nbytes / copy, 2 * size**3 / product)


def judge(case: Case, variant: Variant, seconds: float, ceilings: Ceilings, error: float | None) -> Result:
    memory, arithmetic = case.bytes / ceilings.bandwidth, case.flops / ceilings.compute
    if arithmetic > memory:
        rate = f"{case.flops / seconds / 1e12:.0f} TFLOP/s"
    else:
        rate = f"{case.bytes / seconds / 1e12:.2f} TB/s"
    failed = math.isnan(seconds) or (error is not None and not error <= case.tolerance)
    of_floor = max(memory, arithmetic) / seconds
    return Result(case.kernel, case.shape, variant.name, seconds * 1e6, rate, of_floor, error, failed)


def measure(case: Case, ceilings: Ceilings, sweep: bool) -> Iterator[Result]:
    """The variants of a case and, in a sweep, its five best configurations."""
    error = attempt(f"{case.kernel} {case.shape}", checked_error, case)
    if error is None and case.error is not None:
        error = math.nan
    for variant in case.variants:
        seconds = attempt(variant.name, graph_seconds, variant)
        yield judge(case, variant, math.nan if seconds is None else seconds, ceilings, error)
        error = None
    if not sweep or not case.sweep:
        return
    expected = case.variants[0].calls[0]().double()
    swept = [(attempt(variant.name, candidate_seconds, case, variant, expected), variant) for variant in case.sweep]
    times = [(seconds, variant) for seconds, variant in swept if seconds is not None]
    for seconds, variant in sorted(times, key=lambda pair: pair[0])[:5]:
        yield replace(judge(case, variant, seconds, ceilings, None), swept=True)


def candidate_seconds(case: Case, variant: Variant, expected: torch.Tensor) -> float:
    difference = distance(variant.calls[0](), expected)
    if not difference <= case.tolerance:
        raise ArithmeticError(f"differs from the standing configuration by {difference:.1e}")
    return graph_seconds(variant)


def attempt(name: str, function: Callable[..., float | None], *arguments: Any) -> float | None:
    """None, and a line, where something is refused: one broken kernel must not cost the figures of the others."""
    try:
        return function(*arguments)
    except Exception as refused:
        reason = (str(refused).splitlines() or [""])[0][:150]
        print(f"  {name}: {type(refused).__name__}: {reason}", flush=True)
        return None


def checked_error(case: Case) -> float | None:
    """With every fresh tensor full of NaN, so that a kernel that leaves a hole is seen."""
    if case.error is None:
        return None
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return case.error()
    finally:
        torch.use_deterministic_algorithms(False)


def line(result: Result) -> str:
    error = "" if result.error is None else f"{result.error:.0e}"
    return (
        f"{result.kernel:16} {result.shape:24} {result.microseconds:9.1f} us {result.rate:>11} {result.of_floor:5.0%} "
        f"{error:5} {result.variant}{' FAILED' if result.failed else ''}"
    )


def best(results: list[Result]) -> list[Result]:
    """The fastest swept configuration of every case."""
    fastest: dict[tuple[str, str], Result] = {}
    for result in results:
        if result.swept:
            fastest.setdefault((result.kernel, result.shape), result)
    return list(fastest.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write all results here, as JSON")
    parser.add_argument("--sweep", action="store_true", help="try the candidate configurations too")
    parser.add_argument("--only", default="", help="cases whose kernel or shape contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    results: list[Result] = []
    for cases in (all_cases, step_cases):
        for case in cases():
            if options.only in f"{case.kernel} {case.shape}":
                results += measure(case, ceilings, options.sweep)
                print(f"{case.kernel} {case.shape}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps([asdict(ceilings), *map(asdict, results)], indent=1))
            del case
            torch.cuda.empty_cache()
    print(f"\ncopy {ceilings.bandwidth / 1e12:.2f} TB/s, product {ceilings.compute / 1e12:.0f} TFLOP/s")
    print(*(line(result) for result in results if not result.swept), sep="\n")
    print(*(line(result) for result in best(results)), sep="\n")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
