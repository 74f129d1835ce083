"""Time to the first token of conversations that come back after others took their place in the KV cache.

python -m benchmarks.returning --model llama-8b --json benchmarks/results/returning.json

More conversations than the cache holds have a first turn each; then one after the other has a second, and the time to
its first token is taken: once by a shard that computes evicted prefixes again, once with `--kv-offload-gb`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from legato.benchmark.engine.session import Session, connect, opened
from legato.benchmark.engine.workloads import custom
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import ShardProcess, spawned
from legato.common.options import RouterOptions
from legato.router.step_loop import StepLoop
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from legato.telemetry.metrics import StepFigures

NEW_TOKENS = 4
QUESTION = 64  # tokens of the second turn


class FirstToken:
    def __init__(self) -> None:
        self.at, self.num_cached = 0.0, 0
        self.done = asyncio.Event()

    def put(self, request_id: int, output: Output) -> None:
        if not self.at:
            self.at, self.num_cached = time.perf_counter(), output.num_cached
        if output.finish_reason is not None or output.error is not None:
            self.done.set()


async def ask(loop: StepLoop, number: int, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    began, first = time.perf_counter(), FirstToken()
    loop.submit(GenerationRequest(number, prompt, NEW_TOKENS, ignore_eos=True), first)
    await first.done.wait()
    return first.at - began, first.num_cached


async def measure(session: Session, count: int, length: int, vocab_size: int) -> dict[str, float]:
    steps = StepLoop(Scheduler(session.step_limits), session._stream, session.limits, _ignore)
    running = asyncio.ensure_future(steps.run())
    prompts = [list(prompt) for prompt in custom(count, length, 1, vocab_size).prompts]
    fresh = [await ask(steps, number, prompt) for number, prompt in enumerate(prompts, 1)]
    questions = custom(count, QUESTION, 1, vocab_size).prompts
    again = [
        await ask(steps, count + number, [*prompt, *question])
        for number, (prompt, question) in enumerate(zip(prompts, questions, strict=True), 1)
    ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {
        "first_turn_s": statistics.median(seconds for seconds, _ in fresh),
        "second_turn_s": statistics.median(seconds for seconds, _ in again),
        "cached_tokens": statistics.median(cached for _, cached in again),
    }


def _ignore(step: StepFigures) -> None:
    pass


async def benchmark(shard: ShardProcess, count: int, length: int) -> dict[str, float]:
    """With a cache for half of the conversations."""
    shards, info = await connect(shard)
    options = RouterOptions(max_total_tokens=length + 256, max_batch_total_tokens=count // 2 * (length + 256))
    try:
        async with opened(shards, info, options) as session:
            return await measure(session, count, length, info.vocab_size)
    finally:
        await shards.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a shape of `legato bench engine`, or a model")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--length", type=int, default=20_000)
    parser.add_argument("--offload-gb", type=float, default=24.0)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for name, gigabytes in (("computed_again", 0.0), ("offloaded", options.offload_gb)):
        with spawned(options.model, ("--kv-offload-gb", str(gigabytes))) as shard:
            figures[name] = asyncio.run(benchmark(shard, options.conversations, options.length))
        print(name, figures[name], flush=True)
    times_faster = figures["computed_again"]["second_turn_s"] / figures["offloaded"]["second_turn_s"]
    print(f"to the first token {times_faster:.1f} times faster with offloading")
    if options.json:
        write_json(options.json, environment() | figures)


if __name__ == "__main__":
    main()
