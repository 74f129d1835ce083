"""`legato bench engine`: fixed workloads through scheduler, gRPC and engine, driven as the router drives a shard."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from legato.benchmark.display import Display, display
from legato.benchmark.engine.session import RunFigures, Session, connect, opened
from legato.benchmark.engine.soak import MemoryGrew, Soak, soak, wait_for_captures
from legato.benchmark.engine.workloads import Workload, check_names, custom, make_workloads
from legato.benchmark.options import DEFAULT_WORKLOADS, EngineOptions
from legato.benchmark.report import check_writable, environment, markdown, write_json
from legato.benchmark.shard import ShardProcess, shard_under_test, takes_shard_arguments
from legato.common.errors import OptionError
from legato.common.logging import setup
from legato.common.options import RouterOptions
from legato.common.program import command
from legato.pb import generate_pb2 as pb

# The shortest request, to see when the first token can be had.
PROBE = Workload("probe", [[10]], [1])
HEADER = (
    "Workload", "Requests", "In", "Out", "Seconds", "Tok/s in", "Tok/s out", "Steps", "ms/step",
    "Step p50 ms", "p99", "TTFT p50 ms", "p99",
)  # fmt: skip


@dataclass
class WorkloadResult:
    """All runs of one workload."""

    workload: Workload
    runs: list[RunFigures]

    @property
    def best(self) -> RunFigures:
        return min(self.runs, key=lambda figures: figures.seconds)


@dataclass
class EngineResults:
    workloads: list[WorkloadResult]
    shard: dict[str, Any]
    # Seconds from starting the shard, or from connecting to one that was running.
    ready: float
    first_token: float
    soak: Soak | None = None

    def ratio(self, result: WorkloadResult) -> float | None:
        """The time of a workload over that of its baseline."""
        for other in self.workloads:
            if other.workload is result.workload.baseline:
                return result.best.seconds / other.best.seconds
        return None


def run(options: EngineOptions) -> None:
    setup("info", False, "bench", stream=sys.stderr)
    check_writable("json", options.json)
    names = _names(options)
    if options.socket is not None and options.model is not None:
        raise OptionError("--model starts a shard and --socket measures one that is running: give only one of them")
    started = time.perf_counter()
    with shard_under_test(options.socket, options.model, "leave out --socket") as shard:
        import uvloop  # the loop that the router runs on

        results = uvloop.run(benchmark(options, names, shard, started))
    print(summary(results), flush=True)
    write_json(options.json, to_json(environment(), options, results))
    if results.soak is not None and results.soak.problems:
        raise MemoryGrew("; ".join(results.soak.problems))


async def benchmark(options: EngineOptions, names: Sequence[str], shard: ShardProcess, started: float) -> EngineResults:
    shards, info = await connect(shard)

    async def num_uncaptured() -> int:
        return (await shards.info()).num_uncaptured

    try:
        workloads = _workloads(options, names, info)
        async with opened(shards, info, _router_options(options, workloads, info)) as session:
            ready = time.perf_counter() - started
            _check_lengths(workloads, session)
            await session.run(PROBE)
            found = EngineResults([], _describe(info, session), ready, time.perf_counter() - started)
            if options.duration is None:
                with display() as shown:
                    found.workloads = [await _repeat(session, each, options.repeat, shown) for each in workloads]
            else:
                await wait_for_captures(num_uncaptured)
                found.workloads, found.soak = await _soak(session, workloads, options.duration, shard)
            return found
    finally:
        await shards.close()


async def _repeat(session: Session, workload: Workload, repeat: int, shown: Display) -> WorkloadResult:
    result = WorkloadResult(workload, [])
    for number in range(1, repeat + 1):
        result.runs.append(await session.run(workload))
        shown.update(workload.name, number / repeat, lambda: f"{len(result.runs)}/{repeat} runs")
    shown.line(f"{workload.name}: {result.best.seconds:.3f} s, the fastest of {repeat} runs")
    return result


async def _soak(
    session: Session, workloads: Sequence[Workload], duration: int, shard: ShardProcess
) -> tuple[list[WorkloadResult], Soak]:
    """All workloads in turn until the time is over."""
    results = [WorkloadResult(workload, []) for workload in workloads]
    started = time.perf_counter()
    with display() as shown:

        async def run_all() -> list[int]:
            for result in results:
                result.runs.append(await session.run(result.workload))
            seconds = time.perf_counter() - started
            shown.update("soak", min(1.0, seconds / duration), lambda: f"{seconds:.0f} of {duration} s")
            return [result.runs[-1].blocks_held for result in results]

        return results, await soak(run_all, duration, shard.socket)


def _names(options: EngineOptions) -> list[str]:
    if not options.is_custom:
        return check_names(options.workload or DEFAULT_WORKLOADS)
    if "workload" in options.given:
        raise OptionError("--requests, --prompt and --new describe a custom workload: leave out --workload")
    return []


def _workloads(options: EngineOptions, names: Sequence[str], info: pb.InfoResponse) -> list[Workload]:
    """In the order they run in. A baseline follows the workload that is compared with it."""
    if options.is_custom:
        return [custom(options.requests or 1, options.prompt or 128, options.new or 128, info.vocab_size)]
    chosen = make_workloads(names, options.scale, info.vocab_size)
    return [each for workload in chosen for each in (workload, workload.baseline) if each is not None]


def _router_options(options: EngineOptions, workloads: Sequence[Workload], info: pb.InfoResponse) -> RouterOptions:
    """A cache for the largest workload and no larger: laptops have little memory."""
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
                " raise --max-total-tokens if the model allows it, or reduce the workload with --scale"
            )


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
        "speculate": session.step_limits.speculate,
    }


def summary(results: EngineResults) -> str:
    """A table with the best run of each workload, and the figures of the whole benchmark."""
    lines = [markdown(HEADER, [_row(result) for result in results.workloads])]
    lines.append(f"Ready after {results.ready:.1f} s, first token after {results.first_token:.1f} s.")
    if results.soak is not None:
        lines.append(results.soak.summary())
    for result in results.workloads:
        if (ratio := results.ratio(result)) is not None:
            lines.append(f"{result.workload.name}: {ratio:.2f} times the time of its parts without the cache.")
    return "\n\n".join(lines)


def _row(result: WorkloadResult) -> list[str]:
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


def to_json(environment: dict[str, Any], options: EngineOptions, results: EngineResults) -> dict[str, Any]:
    return {
        **environment,
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


def _figures(figures: RunFigures) -> dict[str, Any]:
    """Summaries are in milliseconds."""
    plain = asdict(figures)
    summaries = {f"{name}_ms": plain.pop(name) for name in ("ttft", "step", "round_trip")}
    rates = {name: getattr(figures, name) for name in ("in_per_second", "out_per_second", "ms_per_step")}
    return {**plain, **rates, **summaries}


COMMAND = takes_shard_arguments(
    command(EngineOptions, run, "engine", "Run fixed workloads through scheduler, gRPC and engine.")
)
