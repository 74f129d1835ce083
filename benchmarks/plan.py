"""How long the scheduler's plans take: `python -m benchmarks.plan [--json FILE]`.

Every plan holds up the router's event loop. The bounds: 5 ms for any plan, 1 ms for a plan of 512 decodes. Times are
CPU times of the thread, so that a busy neighbour changes little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from legato.benchmark.report import write_json
from legato.common.options import DEFAULT_DRAFTS
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, StepPlan, StepResult

BLOCK, ROWS = 16, 512
TOKEN, STEP_SECONDS = 7, 0.01


class Driver:
    """A scheduler with drafts whose shard answers every plan with the same token, after the same time."""

    def __init__(self, num_blocks: int, step_tokens: int = 8192, num_host_blocks: int = 0) -> None:
        limits = SchedulerLimits(
            num_blocks, BLOCK, ROWS, step_tokens, max_mixed_tokens=2048, num_host_blocks=num_host_blocks,
            speculate=DEFAULT_DRAFTS,
        )  # fmt: skip
        self.scheduler = Scheduler(limits)
        self.milliseconds: list[float] = []
        self._next_id = 0
        self._now = 0.0

    def submit(self, tokens: list[int], max_new_tokens: int) -> None:
        self._next_id += 1
        self.scheduler.submit(GenerationRequest(self._next_id, tokens, max_new_tokens, ignore_eos=True))

    def step(self) -> bool:
        started = time.thread_time()
        plan = self.scheduler.plan(self._now)
        self.milliseconds.append((time.thread_time() - started) * 1e3)
        if plan is None:
            return False
        self._now += STEP_SECONDS
        self.scheduler.complete(_answer(self.scheduler, plan), self._now)
        return True

    def run(self, most: int = 1_000_000) -> None:
        while most > 0 and self.step():
            most -= 1

    def measured(self) -> dict[str, float]:
        found, self.milliseconds = sorted(self.milliseconds), []
        return {
            "plans": len(found),
            "median_ms": round(statistics.median(found), 3),
            "p99_ms": round(found[int(0.99 * (len(found) - 1))], 3),
            "worst_ms": round(found[-1], 3),
        }


def _answer(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    sampling = (row for row, (*_, samples) in zip(plan.rows, scheduler._in_flight[0].planned, strict=True) if samples)
    counts = [1 + len(list(takewhile(TOKEN.__eq__, plan.drafts.get(row, ())))) for row in sampling]
    tokens = [TOKEN] * sum(counts)
    forward = round(STEP_SECONDS * 1e9)
    return StepResult(plan.id, tokens, [-1.0] * len(tokens), forward_ns=forward, num_sampled=counts)


def decodes() -> Driver:
    """512 rows that decode."""
    driver = Driver(num_blocks=512 * 40)
    for number in range(ROWS):
        driver.submit([number, *range(15)], 400)
    driver.run(10)
    driver.milliseconds.clear()
    driver.run(300)
    return driver


def drafts() -> Driver:
    """128 rows that decode with drafts, half of them with prompts of 8,000 tokens, and others that begin meanwhile."""
    driver = Driver(num_blocks=128 * 600)
    for number in range(256):
        driver.submit([number, *range(8000 if number % 2 else 15)], 400)
        if number >= 127:
            driver.run(20)
    driver.run()
    return driver


def shared_prefix() -> Driver:
    """511 requests that wait with a cached prefix of 8,192 tokens."""
    driver = Driver(num_blocks=60_000)
    prefix = list(range(8192))
    driver.submit([*prefix, 1], 2)
    driver.run()
    driver.milliseconds.clear()
    for number in range(511):
        driver.submit([*prefix, number, number], 4)
    driver.run()
    return driver


def returning_conversations() -> Driver:
    """512 conversations of 20,000 tokens, each with a turn of 100 more; all of them fit in the cache."""
    driver = Driver(num_blocks=512 * 1400)
    conversations = [[number * 20_000 + at for at in range(20_000)] for number in range(ROWS)]
    for tokens in conversations:
        driver.submit(tokens, 2)
    driver.run()
    driver.milliseconds.clear()
    for tokens in conversations:
        driver.submit([*tokens, *range(100)], 4)
    driver.run()
    return driver


def evictions() -> Driver:
    """The same conversations in a cache that holds a quarter of them: every turn evicts another conversation."""
    driver = Driver(num_blocks=128 * 1400)
    for turn in range(2):
        for number in range(256):
            driver.submit([number * 20_000 + at for at in range(20_000 + 100 * turn)], 2)
        driver.run()
        if turn == 0:
            driver.milliseconds.clear()
    return driver


def offloaded() -> Driver:
    """64 conversations of 20,000 tokens in a cache that holds a quarter of them, the others in host memory: every turn
    evicts one and brings one back."""
    driver = Driver(num_blocks=16 * 1400, num_host_blocks=64 * 1400)
    for turn in range(2):
        for number in range(64):
            driver.submit([number * 20_000 + at for at in range(20_000 + 100 * turn)], 20)
        driver.run()
        if turn == 0:
            driver.milliseconds.clear()
    return driver


def scattered() -> Driver:
    """1,024 waiting requests of mixed lengths, nothing cached."""
    driver = Driver(num_blocks=30_000)
    for number in range(1024):
        length = 16 + 37 * number % 1500
        driver.submit([number * 2000 + at for at in range(length)], 1 + number % 50)
    driver.run()
    return driver


SCENARIOS: list[Callable[[], Driver]] = [
    decodes,
    drafts,
    shared_prefix,
    returning_conversations,
    evictions,
    offloaded,
    scattered,
]


def results() -> Iterator[tuple[str, str, dict[str, float]]]:
    for scenario in SCENARIOS:
        yield scenario.__name__, (scenario.__doc__ or "").strip(), scenario().measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = {}
    print(f"{'scenario':26}{'plans':>8}{'median':>10}{'p99':>10}{'worst':>10}  ms")
    for name, description, figures in results():
        found[name] = {"what": description, **figures}
        columns = "".join(f"{figures[key]:>10}" for key in ("median_ms", "p99_ms", "worst_ms"))
        print(f"{name:26}{figures['plans']:>8}{columns}", flush=True)
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
