"""Quantized products beside bf16 ones on a GPU, and then the engine's workloads with quantized weights.

    python -m benchmarks.quantized --json quantized.json                    # everything
    python -m benchmarks.quantized --part products --formats int4,fp8       # no engine
    python -m benchmarks.quantized --part engine --workloads G1,G2 --seconds 300
    python -m benchmarks.quantized --part engine --formats bf16,int8,w8a16,nf4 --json FILE    # G1 to G4, 90 s each
    python -m benchmarks.quantized --part sweep --rows 1,256                # candidate tiles

Every product of a Llama-3.1-8B layer is compared with float64 and timed in CUDA graphs with overlapping launches, over
enough copies of the matrix that none is in the cache. What fails is reported, and the rest goes on. `--seconds` is the
time after which nothing new begins.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import HIDDEN, INNER, QKV, Variant, distance, num_sets, randn
from benchmarks.kernels import attempt, graph_seconds
from legato.benchmark.report import environment, write_json
from legato.kernels.compilation.ahead import can_compile_ahead, compiling_ahead
from legato.kernels.device import limits_of
from legato.kernels.quantized.eight_bit import quantize_rows
from legato.kernels.quantized.linear import kernel_for, quantized_linear, tiled_config
from legato.kernels.quantized.one_row import OneRowConfig, one_row_linear
from legato.kernels.quantized.operand import Operand
from legato.kernels.quantized.tiled import TiledConfig, tiled_linear
from legato.kernels.small_linear import pays, small_linear
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.operands import operand_of

MATRICES = {"qkv": (QKV, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
# Name -> value of --quantize. int8 also quantizes activations from 17 rows on, w8a16 never.
FORMATS = {"fp8": "fp8", "int4": "int4", "int8": "int8", "w8a16": "eetq", "nf4": "bitsandbytes-nf4"}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CHECKED_ROWS = (1, 3, 16, 17, 100, 2048)
# ‖ours - float64‖ / ‖float64‖: in 16 bits rounding of the result, in 8 bits that of rows, too.
TOLERANCE = {"one_row": 6e-3, "few_rows": 6e-3, "16-bit": 6e-3, "unpacked": 8e-3, "int8": 2e-2}
TOLERANCE_IN_FP8 = 5e-2
WORKLOADS = ("G1", "G2", "G3", "G4")
WORKLOAD_SECONDS = 240


@dataclass(frozen=True)
class Timing:
    matrix: str
    format: str
    rows: int
    kernel: str
    microseconds: float
    dense: float  # microseconds of bf16
    error: float | None = None

    @property
    def speedup(self) -> float:
        return self.dense / self.microseconds


class Clock:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def dense_product(x: Tensor, weight: Tensor) -> Tensor:
    return small_linear(x, weight) if pays(x) else F.linear(x, weight)


def quantized(name: str, matrix: Tensor) -> Operand:
    operand = operand_of(QUANTIZERS[FORMATS[name]](matrix))
    assert operand is not None, name
    return operand


def copies(operand: Operand) -> list[Operand]:
    return [replace(operand, numbers=operand.numbers.clone()) for _ in range(num_sets(operand.numbers.nbytes))]


def seconds_of(calls: list[Callable[[], Tensor]]) -> float:
    found = attempt("timing", graph_seconds, Variant("", calls, overlap=True))  # type: ignore[arg-type]
    return math.nan if found is None else found


def compile_all(calls: list[Callable[[], Tensor]]) -> None:
    """On many threads; what fails is reported when it runs."""
    if can_compile_ahead():
        with compiling_ahead():
            for call in calls:
                attempt("compiling", _launch, call)


def _launch(call: Callable[[], Tensor]) -> None:
    call()


def checked(name: str, operand: Operand, rows: int) -> float | None:
    x = randn(rows, operand.in_features)
    kernel = kernel_for(rows, operand, limits_of(x))
    expected = x.double() @ operand.values(torch.float64).T
    error = distance(quantized_linear(x, operand), expected)
    tolerance = TOLERANCE.get(kernel, TOLERANCE_IN_FP8)
    verdict = "" if error <= tolerance else f"  FAILED: more than {tolerance:.0e}"
    print(f"{name:5} {operand.out_features:6} x {operand.in_features:5} {rows:5} rows {kernel:16} {error:.1e}{verdict}")
    return error


def check_all(formats: list[str], clock: Clock) -> dict[str, float]:
    """The smallest matrix in every format, at row counts for which every kernel is chosen, and an awkward size."""
    errors: dict[str, float] = {}
    for name in formats:
        for shape in ((HIDDEN, HIDDEN), (1000, 1552)):
            operand = quantized(name, randn(*shape))
            compile_all([partial(quantized_linear, randn(rows, shape[1]), operand) for rows in CHECKED_ROWS])
            for rows in CHECKED_ROWS if clock.left > 0 else ():
                found = attempt(f"{name}, {rows} rows", checked, name, operand, rows)
                errors[f"{name} {shape[0]}x{shape[1]} {rows}"] = math.nan if found is None else found
    return errors


def time_products(formats: list[str], row_counts: list[int], clock: Clock) -> Iterator[Timing]:
    for matrix, shape in MATRICES.items():
        weights = randn(num_sets(2 * shape[0] * shape[1]), *shape)
        inputs = {rows: randn(rows, shape[1]) for rows in row_counts}
        dense = {
            rows: seconds_of([partial(dense_product, x, weight) for weight in weights]) * 1e6
            for rows, x in inputs.items()
        }
        first = weights[0].clone()
        del weights
        torch.cuda.empty_cache()
        for name in formats:
            if clock.left < 0:
                return
            sets = copies(quantized(name, first))
            compile_all([partial(quantized_linear, x, sets[0]) for x in inputs.values()])
            for rows, x in inputs.items():
                kernel = kernel_for(rows, sets[0], limits_of(x))
                microseconds = seconds_of([partial(quantized_linear, x, each) for each in sets]) * 1e6
                timing = Timing(matrix, name, rows, kernel, microseconds, dense[rows])
                print(
                    f"{matrix:8} {name:5} {rows:5} rows {microseconds:8.1f} us, bf16 {dense[rows]:8.1f}, "
                    f"{timing.speedup:5.2f}x, {sets[0].numbers.nbytes / microseconds / 1e6:5.2f} TB/s, {kernel}",
                    flush=True,
                )
                yield timing
            del sets
            torch.cuda.empty_cache()


def candidates(rows: int, operand: Operand, x: Tensor) -> Iterator[tuple[str, Callable[[Operand], Tensor]]]:
    """Other tiles than the chosen ones."""
    if rows == 1:
        for tile_rows in (2, 4, 8, 16):
            for num_words, num_warps in ((128, 2), (256, 4), (512, 8), (512, 4), (1024, 8)):
                one = OneRowConfig(tile_rows, num_words, num_warps)
                yield str(one), partial(_one_row, x, one)
        return
    kernel = kernel_for(rows, operand, limits_of(x))
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kernel)
    shapes = (
        ((16, 8, 1), (32, 8, 2), (64, 8, 4)) if rows <= 8 else ((32, 16, 2), (64, 16, 4)) if rows <= 16
        else ((64, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8)) if rows <= 64
        else ((64, 128, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4), (128, 256, 8), (256, 128, 8))
    )  # fmt: skip
    chosen = tiled_config(rows, operand, 2 if dtype is None else 1, limits_of(x))
    splits = sorted({1, 2, chosen.split_k, min(8, 2 * chosen.split_k)})
    for tile_rows, tile, num_warps in shapes:
        for num_stages in (3, 4, 5) if rows <= 64 else (3, 4):
            for split in splits:
                config = TiledConfig(tile_rows, tile, num_warps, num_stages, split)
                yield str(config), partial(_tiled, x, config, dtype)


def _one_row(x: Tensor, config: OneRowConfig, operand: Operand) -> Tensor:
    return one_row_linear(x, operand, config=config)


def _tiled(x: Tensor, config: TiledConfig, dtype: torch.dtype | None, operand: Operand) -> Tensor:
    if dtype is None:
        return tiled_linear(x, operand, config)
    rows = quantize_rows(x, dtype)
    return tiled_linear(rows.numbers, operand, config, rows.scale, x.dtype)


def sweep(formats: list[str], row_counts: list[int], clock: Clock) -> dict[str, list[tuple[str, float]]]:
    """The best five candidates of each product, in microseconds."""
    best: dict[str, list[tuple[str, float]]] = {}
    for matrix, shape in MATRICES.items():
        for name in formats:
            sets = copies(quantized(name, randn(*shape)))
            for rows in row_counts:
                if clock.left < 0:
                    return best
                x = randn(rows, shape[1])
                found = list(candidates(rows, sets[0], x))
                compile_all([partial(call, sets[0]) for _, call in found])
                times = [(text, seconds_of([partial(call, each) for each in sets]) * 1e6) for text, call in found]
                ranked = sorted((time for time in times if not math.isnan(time[1])), key=lambda time: time[1])[:5]
                best[f"{matrix} {name} {rows}"] = ranked
                print(f"{matrix} {name} {rows} rows", *(f"  {us:8.1f} us {text}" for text, us in ranked), sep="\n")
    return best


def run_engine(name: str, workloads: list[str], repeat: int, clock: Clock) -> dict[str, float]:
    """Output tokens per second of each workload, for G3 input tokens; of a shard with dummy weights."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        words = [word for workload in workloads for word in ("--workload", workload)]
        command = ["bench", "engine", "--model", "llama-8b", "--repeat", str(repeat), *words, "--json", str(path)]
        shard = [] if name == "bf16" else ["--", "--quantize", FORMATS[name]]
        limit = min(clock.left, WORKLOAD_SECONDS * len(workloads))
        done = subprocess.run(
            [sys.executable, "-m", "legato.cli", *command, *shard], capture_output=True, text=True, timeout=limit
        )
        print(*(line for line in done.stderr.splitlines() if "Quantized weights" in line), sep="\n")
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode)
        figures = json.loads(path.read_text())["workloads"]
    rate = {"G3": "in_per_second"}
    return {key: value["best"][rate.get(key, "out_per_second")] for key, value in figures.items()}


def engine_figures(
    formats: list[str], workloads: list[str], repeat: int, clock: Clock
) -> Iterator[dict[str, dict[str, float]]]:
    """All figures so far, after each format."""
    found: dict[str, dict[str, float]] = {}
    for name in formats:
        if clock.left < 30:
            print(f"{name}: no time left")
            continue
        result = attempt(name, partial(run_engine, name, workloads, repeat, clock))  # type: ignore[arg-type]
        if result is not None:
            found[name] = result  # type: ignore[assignment]
            print(name, found[name], flush=True)
            yield found


def table(timings: list[Timing]) -> str:
    """Speed relative to bf16 of a layer's four products together, by rows; and the slowest product."""
    lines = ["rows   " + "".join(f"{name:>22}" for name in FORMATS)]
    for rows in sorted({timing.rows for timing in timings}):
        cells = []
        for name in FORMATS:
            ours = [timing for timing in timings if (timing.rows, timing.format) == (rows, name)]
            total = sum(timing.microseconds for timing in ours)
            worst = min((timing.speedup for timing in ours), default=math.nan)
            speedup = sum(timing.dense for timing in ours) / total if total else math.nan
            cells.append(f"{total:8.1f} us {speedup:4.2f} ({worst:4.2f})")
        lines.append(f"{rows:5}  " + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def measure_here(options: argparse.Namespace, keep: Callable[[str, object], None]) -> None:
    """Check, products and sweep, in this process."""
    parts, formats = options.part.split(","), options.formats.split(",")
    row_counts, clock = [int(rows) for rows in options.rows.split(",")], Clock(options.seconds)
    torch.manual_seed(0)
    if "check" in parts:
        keep("errors", check_all(formats, clock))
    if "products" in parts:
        timings: list[dict[str, object]] = []
        for timing in time_products(formats, row_counts, clock):
            timings.append(asdict(timing))
            keep("products", timings)
    if "sweep" in parts:
        keep("sweep", sweep(formats, row_counts, clock))


def measure_apart(options: argparse.Namespace, clock: Clock) -> Iterator[dict[str, object]]:
    """A process for each format: what a kernel breaks in one, the others do not see."""
    for name in options.formats.split(","):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "figures.json"
            words = ["--part", options.part, "--rows", options.rows, "--seconds", str(max(clock.left, 0.0))]
            command = [sys.executable, "-m", "benchmarks.quantized", "--here", "--formats", name, "--json", str(path)]
            # Where the time is over, what was written until then counts.
            attempt(name, partial(subprocess.run, timeout=clock.left + 60), [*command, *words])  # type: ignore[arg-type]
            if path.exists():
                yield json.loads(path.read_text())
            else:
                print(f"{name}: no figures")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--part", default="check,products,engine", help="of check, products, sweep, engine")
    parser.add_argument("--formats", default=",".join(FORMATS), help="for engine also bf16")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each of the engine's workloads")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--here", action="store_true", help="all formats in this process, and no engine")
    options = parser.parse_args()
    report: dict[str, Any] = {} if options.here else environment()

    def keep(name: str, value: object) -> None:
        report[name] = value
        if options.json:
            write_json(options.json, report)

    if options.here:
        measure_here(options, keep)
        return 0
    clock = Clock(options.seconds)
    if set(options.part.split(",")) & {"check", "products", "sweep"}:
        for found in measure_apart(options, clock):
            for name, value in found.items():
                keep(name, value + report.get(name, []) if isinstance(value, list) else report.get(name, {}) | value)
    if "engine" in options.part.split(","):
        formats, workloads = options.formats.split(","), options.workloads.split(",")
        for engine in engine_figures(formats, workloads, options.repeat, clock):
            keep("engine", engine)
    if "products" in report:
        print("\nfour products of a layer: microseconds, times as fast as bf16 (the slowest of the four)")
        print(table([Timing(**each) for each in report["products"]]))
    for name, figures in report.get("engine", {}).items():
        print(f"{name:5}", *(f"{workload} {rate:9,.1f}" for workload, rate in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
