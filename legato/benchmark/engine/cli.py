"""`legato bench engine`: fixed workloads through scheduler, gRPC and engine, the way the router drives a shard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from legato.benchmark.engine.session import Figures, Session, connect, opened
from legato.benchmark.engine.soak import MemoryGrew, Soak, settled, soak
from legato.benchmark.engine.workloads import Workload, check_names, custom, make_workloads
from legato.benchmark.machine import circumstances
from legato.benchmark.options import (
    DEFAULT_WORKLOADS,
    EngineOptions,
    check_writable,
    shard_arguments,
    takes_shard_arguments,
)
from legato.benchmark.shard import Shard, running, spawned
from legato.benchmark.tables import markdown
from legato.common.errors import OptionError
from legato.common.logging import setup
from legato.common.options import RouterOptions
from legato.common.program import command
from legato.common.progress import progress
from legato.pb import generate_pb2 as pb
from legato.router.shards import GrpcShards

# A prompt and an answer that take no time of their own, to see when the first token can be had.
PROBE = Workload("probe", [[10]], [1])
HEADER = (
    "Workload", "Requests", "In", "Out", "Seconds", "Tok/s in", "Tok/s out", "Steps", "ms/step",
    "Step p50 ms", "p99", "TTFT p50 ms", "p99",
)  # fmt: skip


@dataclass
class Result:
    """All runs of one workload."""

    workload: Workload
    runs: list[Figures]

    @property
    def best(self) -> Figures:
        return min(self.runs, key=lambda figures: figures.seconds)


@dataclass
class Results:
    workloads: list[Result]
    shard: dict[str, Any]
    # Seconds from starting the shard, or from connecting to one that was there.
    ready: float
    first_token: float
    soak: Soak | None = None

    def ratio(self, result: Result) -> float | None:
        """The time of a workload in terms of its baseline's."""
        for other in self.workloads:
            if other.workload is result.workload.baseline:
                return result.best.seconds / other.best.seconds
        return None


def run(options: EngineOptions) -> None:
    setup("info", False, "bench", stream=sys.stderr)
    check_writable("json", options.json)
    names = _names(options)
    with _shard(options) as (shard, started):
        import uvloop  # the loop that the router runs on

        results = uvloop.run(benchmark(options, names, shard, started))
    print(summary(results), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(to_json(circumstances(), options, results), indent=2) + "\n")
    if results.soak is not None and results.soak.problems:
        raise MemoryGrew("; ".join(results.soak.problems))


async def benchmark(options: EngineOptions, names: Sequence[str], shard: Shard, started: float) -> Results:
    shards, info = await connect(shard)
    try:
        workloads = _workloads(options, names, info)
        async with opened(shards, info, _router_options(options, workloads, info)) as session:
            ready = time.perf_counter() - started
            _check_lengths(workloads, session)
            await session.run(PROBE, lambda count: None)
            first_token = time.perf_counter() - started
            if options.duration is None:
                results = [await _repeat(session, workload, options.repeat) for workload in workloads]
                return Results(results, _describe(info, session), ready, first_token)
            await settled(lambda: _num_uncaptured(shards))
            results, soaked = await _soak(session, workloads, options.duration, shard)
            return Results(results, _describe(info, session), ready, first_token, soaked)
    finally:
        await shards.close()


async def _num_uncaptured(shards: GrpcShards) -> int:
    return (await shards.info()).num_uncaptured


async def _repeat(session: Session, workload: Workload, repeat: int) -> Result:
    total = len(workload.prompts) * repeat
    with progress(workload.name, total, unit="requests") as advance:
        return Result(workload, [await session.run(workload, advance) for _ in range(repeat)])


async def _soak(
    session: Session, workloads: Sequence[Workload], duration: int, shard: Shard
) -> tuple[list[Result], Soak]:
    """All workloads in turn, for as long as it takes."""
    results = [Result(workload, []) for workload in workloads]

    async def run_all() -> list[int]:
        for result in results:
            result.runs.append(await session.run(result.workload, lambda count: None))
        advance(len(results))
        return [result.runs[-1].blocks_held for result in results]

    with progress("soak", 0, unit="runs") as advance:
        return results, await soak(run_all, duration, shard.socket)


def _names(options: EngineOptions) -> list[str]:
    if not options.is_custom:
        return check_names(options.workload or DEFAULT_WORKLOADS)
    if "workload" in options.given:
        raise OptionError("--workload names fixed work; --requests, --prompt and --new describe your own: give either")
    return []


def _workloads(options: EngineOptions, names: Sequence[str], info: pb.InfoResponse) -> list[Workload]:
    """In the order they run in. A baseline comes right after the work that is compared with it."""
    if options.is_custom:
        return [custom(options.requests or 1, options.prompt or 128, options.new or 128, info.vocab_size)]
    chosen = make_workloads(names, options.scale, info.vocab_size)
    return [each for workload in chosen for each in (workload, workload.baseline) if each is not None]


def _router_options(options: EngineOptions, workloads: Sequence[Workload], info: pb.InfoResponse) -> RouterOptions:
    """Room for the largest workload, and no more: a laptop has other things to hold."""
    needed = max(workload.cache_tokens(info.block_size) for workload in workloads)
    return RouterOptions(
        max_concurrent_requests=options.max_rows,
        max_batch_size=options.max_rows,
        max_total_tokens=options.max_total_tokens,
        max_batch_total_tokens=max(needed, options.max_total_tokens),
        max_batch_prefill_tokens=options.step_tokens,
    )


def _check_lengths(workloads: Sequence[Workload], session: Session) -> None:
    limit = session.limits.max_total_tokens
    for workload in workloads:
        if workload.longest > limit:
            raise OptionError(
                f"{workload.name} has a request of {workload.longest} tokens and the shard takes {limit}:"
                " raise --max-total-tokens if the model allows, or make the work smaller with --scale"
            )


@contextmanager
def _shard(options: EngineOptions) -> Iterator[tuple[Shard, float]]:
    """The shard, and when we began to wait for it."""
    arguments = shard_arguments(options.socket is None, "leave out --socket")
    started = time.perf_counter()
    if options.socket is None:
        with spawned(options.model, arguments) as shard:
            yield shard, started
    elif options.model is not None:
        raise OptionError("--model is what a new shard serves and --socket is a shard that runs: give either")
    else:
        yield running(options.socket), started


def _describe(info: pb.InfoResponse, session: Session) -> dict[str, Any]:
    return {
        "model_type": info.model_type,
        "dtype": info.dtype,
        "device": info.device_type,
        "block_size": info.block_size,
        "num_blocks": session.step_limits.num_blocks,
        "max_rows": session.step_limits.max_rows,
        "max_step_tokens": session.step_limits.max_step_tokens,
        "max_total_tokens": session.limits.max_total_tokens,
    }


def summary(results: Results) -> str:
    """A table with the best run of each workload, and what concerns all of them."""
    lines = [markdown(HEADER, [_row(result) for result in results.workloads])]
    lines.append(f"Ready after {results.ready:.1f} s, first token after {results.first_token:.1f} s.")
    if results.soak is not None:
        lines.append(results.soak.summary())
    for result in results.workloads:
        if (ratio := results.ratio(result)) is not None:
            lines.append(f"{result.workload.name}: {ratio:.2f} times the time of its parts without the cache.")
    return "\n\n".join(lines)


def _row(result: Result) -> list[str]:
    best = result.best
    counts = (len(result.workload.prompts), best.num_in, best.num_out)
    rates = (f"{best.seconds:.3f}", f"{best.in_per_second:,.1f}", f"{best.out_per_second:,.1f}", f"{best.num_steps:,}")
    times = (best.ms_per_step, best.step.p50, best.step.p99, best.ttft.p50, best.ttft.p99)
    return [
        result.workload.name,
        *(f"{count:,}" for count in counts),
        *rates,
        *(f"{milliseconds:.2f}" for milliseconds in times),
    ]


def to_json(around: dict[str, Any], options: EngineOptions, results: Results) -> dict[str, Any]:
    return {
        **around,
        "model": options.model or options.socket or "default",
        "shard": results.shard,
        "scale": options.scale,
        "ready_seconds": results.ready,
        "first_token_seconds": results.first_token,
        "soak": None if results.soak is None else results.soak.to_json(),
        "workloads": {
            result.workload.name: {
                "requests": len(result.workload.prompts),
                "prefix_caching": result.workload.prefix_caching,
                "times_its_parts": results.ratio(result),
                "best": _figures(result.best),
                "runs": [_figures(figures) for figures in result.runs],
            }
            for result in results.workloads
        },
    }


def _figures(figures: Figures) -> dict[str, Any]:
    """Summaries are in milliseconds, and say so."""
    plain = asdict(figures)
    summaries = {f"{name}_ms": plain.pop(name) for name in ("ttft", "step", "round_trip")}
    rates = {name: getattr(figures, name) for name in ("in_per_second", "out_per_second", "ms_per_step")}
    return {**plain, **rates, **summaries}


bench = click.Group("bench", help="Measure Legato.")
bench.add_command(
    takes_shard_arguments(
        command(EngineOptions, run, "engine", "Run fixed workloads through scheduler, gRPC and engine.")
    )
)
