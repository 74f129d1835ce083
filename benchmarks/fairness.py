"""How long streams wait for their next token while long prompts arrive, and what these prompts pay for it.

python -m benchmarks.fairness --model llama-8b --json benchmarks/results/fairness.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import replace

from legato.benchmark.engine.session import Session, connect, opened
from legato.benchmark.engine.workloads import custom
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import ShardProcess, spawned
from legato.common.options import RouterOptions
from legato.router.step_loop import StepLoop
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from legato.telemetry.metrics import StepFigures

# Steps that are shown, the slowest of each run.
NUM_SHOWN = 8
# Long enough that all streams decode while the prompts are computed.
STREAM_PROMPT, STREAM_TOKENS = 128, 600


class Times:
    """When each token of one request came."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.done = asyncio.Event()

    def put(self, request_id: int, output: Output) -> None:
        self.tokens.append(time.perf_counter())
        if output.finish_reason is not None or output.error is not None:
            self.done.set()


async def measure(
    session: Session, num_streams: int, num_prompts: int, length: int, vocab_size: int
) -> dict[str, float]:
    """Without streams: the time of the prompts alone."""
    scheduler = Scheduler(replace(session.step_limits, prefix_caching=False, max_requests=None))
    figures: list[tuple[float, StepFigures]] = []
    record = lambda step: figures.append((time.perf_counter(), step))  # noqa: E731
    loop = StepLoop(scheduler, session._stream, session.limits, record)
    steps = asyncio.ensure_future(loop.run())
    ids = itertools.count(1)
    streams, prompts = ([Times() for _ in range(count)] for count in (num_streams, num_prompts))
    for times, prompt in zip(streams, custom(max(num_streams, 1), STREAM_PROMPT, 1, vocab_size).prompts, strict=False):
        loop.submit(GenerationRequest(next(ids), prompt, STREAM_TOKENS, ignore_eos=True), times)
    while any(len(times.tokens) < 8 for times in streams):
        await asyncio.sleep(0.01)
    arrived = time.perf_counter()
    for times, prompt in zip(prompts, custom(num_prompts, length, 1, vocab_size).prompts, strict=True):
        loop.submit(GenerationRequest(next(ids), prompt, 1, ignore_eos=True), times)
    for times in prompts:
        await times.done.wait()
    computed = max(times.tokens[0] for times in prompts)
    for times in streams:
        await times.done.wait()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    gaps = sorted(
        (after - before) * 1e3
        for times in streams
        for before, after in itertools.pairwise(times.tokens)
        if arrived < after < computed
    )
    print(f"{num_streams} streams, {num_prompts} prompts: {computed - arrived:.2f} s; the slowest steps:")
    show_slowest([(after - arrived, step) for after, step in figures if arrived < after < computed])
    found = {"prompts_s": computed - arrived}
    if gaps:
        found |= {"gap_ms_p50": gaps[len(gaps) // 2], "gap_ms_p99": gaps[len(gaps) * 99 // 100], "gap_ms_max": gaps[-1]}
    return found


def show_slowest(steps: list[tuple[float, StepFigures]]) -> None:
    """When they were done, and of what: milliseconds on the device, beside it in the shard, and in the scheduler."""
    for after, step in sorted(steps, key=lambda pair: -pair[1].forward_time - pair[1].planning_time)[:NUM_SHOWN]:
        on_device, beside = step.forward_time * 1e3, step.decode_time * 1e3
        planned, booked = step.planning_time * 1e3, step.filter_time * 1e3
        print(
            f"  at {after:6.3f} s: {step.num_computed:5} tokens, {step.num_admitted} admitted, device {on_device:.1f}, "
            f"beside {beside:6.1f}, plan {planned:5.1f}, booking {booked:5.1f} ms"
        )


async def benchmark(shard: ShardProcess, streams: int, prompts: int, length: int) -> dict[str, dict[str, float]]:
    shards, info = await connect(shard)
    tokens = streams * (STREAM_PROMPT + STREAM_TOKENS + 16) + prompts * (length + 32)
    options = RouterOptions(max_total_tokens=length + 16, max_batch_total_tokens=tokens)
    try:
        async with opened(shards, info, options) as session:
            await measure(session, 0, 1, length, info.vocab_size)  # the first run of a new shard is slower
            alone = await measure(session, 0, prompts, length, info.vocab_size)
            first, beside = [await measure(session, streams, prompts, length, info.vocab_size) for _ in range(2)]
            beside["prompt_speed_of_alone"] = alone["prompts_s"] / beside["prompts_s"]
            return {"alone": alone, "beside_streams_first": first, "beside_streams": beside}
    finally:
        await shards.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a shape of `legato bench engine`, or a model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    with spawned(options.model, ()) as shard:
        figures = asyncio.run(benchmark(shard, options.streams, options.prompts, options.length))
    print(json.dumps(figures, indent=2))
    if options.json:
        write_json(options.json, environment() | figures)


if __name__ == "__main__":
    main()
