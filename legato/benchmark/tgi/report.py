"""What text-generation-benchmark has to say in the end: TGI's three tables, and all of it as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.stats import Summary
from legato.benchmark.tables import markdown
from legato.benchmark.tgi.unary import Measured

LATENCIES = ("Prefill", "Decode (token)", "Decode (total)")
THROUGHPUTS = ("Prefill", "Decode")
PARAMETER_HEADER = ("Parameter", "Value")
LATENCY_HEADER = ("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99")
THROUGHPUT_HEADER = LATENCY_HEADER[:5]


def parameters(options: BenchmarkOptions, model: str) -> dict[str, object]:
    """TGI's names for what was asked for, in its order."""
    return {
        "Model": model,
        "Sequence Length": options.sequence_length,
        "Decode Length": options.decode_length,
        "Top N Tokens": options.top_n_tokens,
        "N Runs": options.runs,
        "Warmups": options.warmups,
        "Temperature": options.temperature,
        "Top K": options.top_k,
        "Top P": options.top_p,
        "Typical P": options.typical_p,
        "Repetition Penalty": options.repetition_penalty,
        "Frequency Penalty": options.frequency_penalty,
        "Watermark": options.watermark,
        "Do Sample": options.do_sample,
    }


def tables(asked: dict[str, object], results: Sequence[Measured]) -> str:
    return "\n\n".join(
        [
            markdown(PARAMETER_HEADER, parameter_rows(asked)),
            markdown(LATENCY_HEADER, latency_rows(results)),
            markdown(THROUGHPUT_HEADER, throughput_rows(results)),
        ]
    )


def parameter_rows(asked: dict[str, object]) -> list[list[str]]:
    return [[name, str(value).lower() if isinstance(value, bool) else str(value)] for name, value in asked.items()]


def latency_rows(results: Sequence[Measured]) -> list[list[str]]:
    names = ("average", "lowest", "highest", "p50", "p90", "p99")
    return [
        [step if first else "", str(measured.batch_size), *_cells(measured.latency(step), names, "ms")]
        for step in LATENCIES
        for first, measured in _with_first(results)
    ]


def throughput_rows(results: Sequence[Measured]) -> list[list[str]]:
    names = ("average", "lowest", "highest")
    return [
        [step if first else "", str(measured.batch_size), *_cells(measured.throughput(step), names, "tokens/secs")]
        for step in THROUGHPUTS
        for first, measured in _with_first(results)
    ]


def to_json(
    circumstances: dict[str, Any], shard: dict[str, Any], asked: dict[str, object], results: Sequence[Measured]
) -> dict[str, Any]:
    return {**circumstances, "shard": shard, "parameters": asked, "results": [_measured(item) for item in results]}


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "batch_size": measured.batch_size,
        "latency_ms": {step: _summary(values) for step, values in measured.latencies.items()},
        "throughput_tokens_per_second": {step: _summary(values) for step, values in measured.throughputs.items()},
    }


def _summary(values: list[float]) -> dict[str, Any] | None:
    summary = Summary.of(values)
    return None if summary is None else {**asdict(summary), "values": values}


def _cells(summary: Summary | None, names: Sequence[str], unit: str) -> list[str]:
    if summary is None:
        return ["-"] * len(names)
    return [f"{getattr(summary, name):.2f} {unit}" for name in names]


def _with_first(results: Sequence[Measured]) -> list[tuple[bool, Measured]]:
    """The step is named in the first of its rows only, as in TGI's tables."""
    return [(number == 0, measured) for number, measured in enumerate(results)]
