"""`legato bench cpu`: compares Legato with llama.cpp, OpenVINO GenAI and vLLM on this machine's CPU."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from legato.benchmark.cpu.comparison import OURS, Comparison, EngineResult
from legato.benchmark.cpu.engines import ENGINES, EngineFailed, EngineMissing, RunningEngine, started
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.cpu.surroundings import CpuLimit, cpu_limit, neighbour
from legato.benchmark.cpu.work import WARM_UP, CpuFigures, CpuWorkload, chosen, vocabulary_of
from legato.benchmark.options import DEFAULT_CPU_WORKLOADS, CpuOptions
from legato.benchmark.report import check_writable, environment, write_json
from legato.benchmark.shard import takes_shard_arguments, terminable
from legato.common.errors import OptionError
from legato.common.program import command


def run(options: CpuOptions) -> None:
    check_writable("json", options.json)
    names = options.engine or tuple(ENGINES)
    if unknown := [name for name in names if name not in ENGINES]:
        raise OptionError(f"--engine {unknown[0]}: it must be one of {', '.join(ENGINES)}")
    workloads = chosen(options.workload or DEFAULT_CPU_WORKLOADS, options.scale)
    found = Comparison()
    with tempfile.TemporaryDirectory(prefix="legato-bench-") as scratch, terminable(), cpu_limit(options.cpus) as limit:
        model = CpuModel(options.model, Path(scratch))
        try:
            for name in names:
                _measure(name, options, model, workloads, limit, found)
        finally:
            # Also after Ctrl-C: show what was measured until then.
            if any(result.runs for result in found.results.values()):
                _report(options, model, limit, found)
    if not found.results:
        raise EngineMissing("no engine was measured: " + "; ".join(f"{name}: {why}" for name, why in _reasons(found)))


def _measure(
    name: str, options: CpuOptions, model: CpuModel, workloads: Sequence[CpuWorkload], limit: CpuLimit,
    found: Comparison,
) -> None:  # fmt: skip
    """One engine, from its start to its end, into `found`. Only a failure of our own ends the benchmark."""
    words: tuple[str, ...] = click.get_current_context().params["shard_args"] if name == OURS else ()
    result: EngineResult | None = None
    try:
        engine_command = ENGINES[name](model, Path(options.peers), words)
        result = found.results[name] = EngineResult(engine_command)
        began = time.perf_counter()
        with started(engine_command, limit) as engine:
            engine.wait_until_ready()
            result.ready_seconds, result.ready_bytes = time.perf_counter() - began, engine.memory_bytes
            _say(f"{name}: ready after {result.ready_seconds:.1f} s")
            with neighbour(options.neighbour):
                _run_all(engine, name, workloads, vocabulary_of(model.files), options.repeat, result)
            result.final_bytes = engine.memory_bytes
    except (EngineMissing, EngineFailed) as error:
        if name == OURS:
            raise
        found.left_out[name] = str(error)
        if result is not None and not result.final_bytes:
            del found.results[name]
        _say(f"{name}: not measured: {error}")


def _run_all(
    engine: RunningEngine, name: str, workloads: Sequence[CpuWorkload], vocabulary: Sequence[int], repeat: int,
    result: EngineResult,
) -> None:  # fmt: skip
    _run(engine, WARM_UP, vocabulary, 0)
    for seed in range(1, repeat + 1):
        for workload in workloads:
            figures = _run(engine, workload, vocabulary, seed)
            result.runs.setdefault(workload.name, []).append(figures)
            pace = "" if figures.token_ms is None else f", {figures.token_ms:.2f} ms per token"
            _say(
                f"{name}: {workload.name}, run {seed}: {figures.seconds:.2f} s, first token after"
                f" {figures.first_token_ms:.0f} ms{pace}, {figures.out_per_second:.1f} tok/s"
            )


def _run(engine: RunningEngine, workload: CpuWorkload, vocabulary: Sequence[int], seed: int) -> CpuFigures:
    records, seconds = engine.run(workload, workload.prompts(vocabulary, seed))
    for record in records:
        if record.error is not None:
            raise EngineFailed(f"{workload.name}: {record.error}: {record.detail}{engine.last_lines()}")
        if record.num_tokens != workload.new_tokens:
            raise EngineFailed(f"{workload.name}: {record.num_tokens} tokens instead of {workload.new_tokens}")
    return CpuFigures.of(workload, records, seconds)


def _report(options: CpuOptions, model: CpuModel, limit: CpuLimit, found: Comparison) -> None:
    print(found.table())
    print(f"\nBetter of {options.repeat} runs. {'; '.join(_circumstances(options, limit))}.", flush=True)
    for name, why in _reasons(found):
        print(f"Not measured: {name}: {why}")
    around: dict[str, Any] = {
        **environment(),
        "model": model.path.name,
        "repeat": options.repeat,
        "scale": options.scale,
        "neighbour_nice": options.neighbour,
        "cpu_limit": limit.words,
    }
    write_json(options.json, around | found.to_json())


def _circumstances(options: CpuOptions, limit: CpuLimit) -> list[str]:
    beside = "none" if options.neighbour is None else f"one busy process, nice {options.neighbour}"
    shorter = [f"Workloads divided by {options.scale}"] if options.scale > 1 else []
    return [*shorter, f"Neighbour: {beside}", f"CPU limit: {limit.words}"]


def _reasons(found: Comparison) -> list[tuple[str, str]]:
    """Why engines were left out, in their first lines."""
    return [(name, why.splitlines()[0]) for name, why in found.left_out.items()]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMAND = takes_shard_arguments(
    command(CpuOptions, run, "cpu", "Compare Legato with llama.cpp, OpenVINO GenAI and vLLM on this machine's CPU.")
)
