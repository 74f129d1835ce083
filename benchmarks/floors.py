"""How near one stream comes to the speed at which memory could deliver what its tokens read.

    python -m benchmarks.floors --out benchmarks/results/floors.json

Runs `legato bench engine --workload G1` for every shape: one stream, 128 tokens in and 128 out, random weights, through
gRPC. A decoded token reads all weights of its path and the keys and values of what came before; the floor is the time
that takes at `--bandwidth`. Two figures of the fastest run are compared with it: all tokens over the whole run, which
has the prompt's step in it, and the median time between two steps, which has only decoding. The file is written after
every shape, and a shape that fails leaves the others alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkFailed, figures_of, leave_nothing_behind
from legato.benchmark.report import environment, markdown, write_json
from legato.modelfiles.shapes import SHAPES
from legato.models.sizes import Sizes
from legato.plan.counting import CountedModel
from legato.plan.memory import SIZES

WORKLOAD = "G1"
MODELS = "llama-8b,qwen3-8b,falcon-7b,starcoder-15b,mixtral-8x7b"
HEADER = ("Shape", "Active GB", "KV MB", "Floor tok/s", "Tok/s, whole run", "Share", "Share by step p50")

Benchmark = Callable[[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Floor:
    """What a decoded token reads, and how many a second could be read."""

    weight_bytes: int
    kv_bytes: float  # at the mean context of the run
    tokens_per_second: float

    @classmethod
    def of(cls, config: dict[str, Any], dtype: str, context: float, bandwidth: float) -> Floor:
        """`context` tokens of keys and values, `bandwidth` in TB/s."""
        weights = num_active(config) * SIZES[dtype]
        kv = CountedModel(config, dtype).shard_size(1).kv_numbers * SIZES[dtype] * context
        return cls(weights, kv, bandwidth * 1e12 / (weights + kv))


@dataclass(frozen=True)
class Figures:
    """Of one shape. Shares are those of the floor."""

    dtype: str
    device: str
    floor: Floor
    tokens_per_second: float  # of the whole run
    step_p50_ms: float
    all_tokens_per_second: list[float]  # of every run

    @classmethod
    def of(cls, config: dict[str, Any], measured: dict[str, Any], bandwidth: float) -> Figures:
        """From the file of `legato bench engine`."""
        shard, work = measured["shard"], measured["workloads"][WORKLOAD]
        best, dtype = work["best"], shard["dtype"].removeprefix("torch.")
        context = best["num_in"] + (best["num_out"] - 1) / 2
        return cls(
            dtype=dtype,
            device=shard["device"],
            floor=Floor.of(config, dtype, context, bandwidth),
            tokens_per_second=best["out_per_second"],
            step_p50_ms=best["step_ms"]["p50"],
            all_tokens_per_second=[run["out_per_second"] for run in work["runs"]],
        )

    @property
    def share(self) -> float:
        return self.tokens_per_second / self.floor.tokens_per_second

    @property
    def step_share(self) -> float:
        return 1e3 / self.step_p50_ms / self.floor.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "step_share": self.step_share}


def num_active(config: dict[str, Any]) -> int:
    """Parameters that a decoded token reads: all but those of the experts that it is not sent to, and but the
    embedding, of which it takes a row, unless that is the head too."""
    numbers, sizes = CountedModel(config, "float16").numbers, Sizes.of(config)
    count = sizes.keys.count("num_local_experts", default=1)
    chosen = sizes.keys.count("num_experts_per_tok", default=1)
    active = sum(num * chosen // count if ".experts." in name else num for name, num in numbers.items())
    return active - (sizes.vocab_size * sizes.hidden_size if "lm_head.weight" in numbers else 0)


def run_benchmark(name: str, repeat: int) -> dict[str, Any]:
    """What `legato bench engine` writes about a model."""
    return figures_of(
        ["-m", "legato.cli", "bench", "engine", f"--model={name}", f"--workload={WORKLOAD}", f"--repeat={repeat}"]
    )


def measure(name: str, repeat: int, bandwidth: float, benchmark: Benchmark) -> Figures | BenchmarkFailed:
    try:
        return Figures.of(SHAPES[name], benchmark(name, repeat), bandwidth)
    except BenchmarkFailed as error:
        return error


def table(results: dict[str, Figures | BenchmarkFailed]) -> str:
    return markdown(HEADER, [_row(name, result) for name, result in results.items()])


def _row(name: str, result: Figures | BenchmarkFailed) -> list[str]:
    if isinstance(result, BenchmarkFailed):
        return [name, *["-"] * (len(HEADER) - 1)]
    floor = result.floor
    sizes = (f"{floor.weight_bytes / 1e9:.2f}", f"{floor.kv_bytes / 1e6:.1f}")
    rates = (f"{floor.tokens_per_second:,.1f}", f"{result.tokens_per_second:,.1f}")
    return [name, *sizes, *rates, f"{result.share:.1%}", f"{result.step_share:.1%}"]


def to_json(results: dict[str, Figures | BenchmarkFailed]) -> dict[str, Any]:
    return {
        name: {"error": str(result)} if isinstance(result, BenchmarkFailed) else result.to_json()
        for name, result in results.items()
    }


def shape_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(SHAPES)}")
    return names


def main(words: Sequence[str] | None = None, benchmark: Benchmark = run_benchmark) -> int:
    parser = argparse.ArgumentParser(description="One stream against the bandwidth of the memory.")
    parser.add_argument("--model", type=shape_names, default=MODELS, help="shapes, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that the memory delivers")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(words)
    if options.repeat < 1 or options.bandwidth <= 0:
        parser.error("--repeat is at least 1, and --bandwidth more than 0")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    around = {**environment(), "workload": WORKLOAD, "bandwidth_tb_per_second": options.bandwidth}
    results: dict[str, Figures | BenchmarkFailed] = {}
    for name in options.model:
        print(f"{name}:", file=sys.stderr, flush=True)
        results[name] = measure(name, options.repeat, options.bandwidth, benchmark)
        if options.out is not None:
            write_json(options.out, {**around, "shapes": to_json(results)})
    print(table(results))
    failed = {name: result for name, result in results.items() if isinstance(result, BenchmarkFailed)}
    for name, error in failed.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
