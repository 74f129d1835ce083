"""A large backlog of prompts is computed in full steps while few requests decode (`--waiting-served-ratio`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from legato.scheduling.budget import CATCH_UP_STEPS, Backlog, StepBudget, step_sizes
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, PromptSpan, StepResult

H200 = step_sizes("cuda", None)
LARGE = Backlog(64, CATCH_UP_STEPS * H200.max_tokens + 1)
NEW_TOKENS = 4096


def scheduler(ratio: float = 0.3) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            num_blocks=65_536,
            block_size=16,
            max_rows=512,
            max_step_tokens=H200.max_tokens,
            prefix_caching=False,
            max_mixed_tokens=H200.mixed_tokens,
            most_mixed_tokens=H200.most_mixed_tokens,
            mixed_step_time=H200.mixed_time,
            waiting_served_ratio=ratio,
        )
    )


ids = itertools.count()


def submit(to: Scheduler, count: int, prompt_len: int, tenant: str = "") -> None:
    for _ in range(count):
        to.submit(GenerationRequest(next(ids), [7] * prompt_len, NEW_TOKENS, tenant=tenant))


def submit_images(to: Scheduler, count: int, num_tokens: int) -> None:
    for _ in range(count):
        span = PromptSpan(start=20, num_tokens=num_tokens, token_id=3)
        to.submit(GenerationRequest(next(ids), [7] * (40 + num_tokens), NEW_TOKENS, images=(span,)))


def mixed_steps(of: Scheduler) -> Iterator[tuple[int, int]]:
    """(decodes, prompt tokens) of the steps that have both, until all prompts are computed. Each takes 50 ms."""
    while of.queue or any(entry.num_to_compute > 1 for entry in of.running):
        plan = of.plan()
        assert plan is not None
        decodes = plan.num_tokens.count(1)
        if decodes and decodes < len(plan.rows):
            yield decodes, sum(plan.num_tokens) - decodes
        num = sum(samples for *_, samples in of._in_flight[0].planned)
        of.complete(StepResult(plan.id, [9] * num, [0.0] * num, forward_ns=50_000_000))


def test_many_prompts_that_wait_beside_few_decodes_are_computed_in_full_steps() -> None:
    work = scheduler()
    submit(work, 64, 4096)
    steps = list(mixed_steps(work))
    assert all(prompts + decodes > 6000 for decodes, prompts in steps if 64 - decodes > 0.1 * decodes + 2)
    assert all(prompts <= H200.mixed_limit for decodes, prompts in steps if 64 - decodes < 0.1 * decodes)
    assert any(64 - decodes < 0.1 * decodes for decodes, _ in steps)


def test_images_count_twice_because_they_are_encoded_as_well() -> None:
    """32 images of 1,369 tokens are six full steps of prompts, and as much again of encoding."""
    work = scheduler()
    submit(work, 1, 16)
    next(mixed_steps(work), None)
    submit_images(work, 32, 1369)
    assert max(prompts for _, prompts in mixed_steps(work)) > 6000
    assert work.shares.queued_work == 0


@pytest.mark.parametrize(
    ("count", "prompt_len", "streams"),
    [(4, 32_768, 64), (448, 128, 64), (1, 32_768, 1), (16, 4096, 64)],
    ids=["few long prompts", "many short ones", "one long prompt", "a quarter of the streams"],
)
def test_otherwise_streams_keep_their_pace(count: int, prompt_len: int, streams: int) -> None:
    work = scheduler()
    submit(work, streams, 16)
    for _ in range(3):
        next(mixed_steps(work), None)
    submit(work, count, prompt_len)
    assert max(prompts for _, prompts in mixed_steps(work)) <= H200.mixed_limit


def test_no_tenants_prompts_slow_down_the_streams_of_another() -> None:
    work = scheduler()
    submit(work, 1, 16, "reader")
    next(mixed_steps(work), None)
    submit(work, 64, 4096, "batch")
    assert max(prompts for _, prompts in mixed_steps(work)) <= H200.mixed_limit


def test_a_ratio_that_is_never_reached_switches_it_off() -> None:
    work = scheduler(math.inf)
    submit(work, 64, 4096)
    assert max(prompts for _, prompts in mixed_steps(work)) <= H200.mixed_limit


def test_what_was_begun_goes_on_until_one_full_step_is_left() -> None:
    budget = StepBudget(H200.__class__(8192, 2048, 0.050, waiting_served_ratio=0.3))
    less = Backlog(64, 3 * H200.max_tokens)
    assert budget.room(10, less).tokens == 2048
    assert budget.room(10, LARGE).tokens == 8182
    assert budget.room(10, less).tokens == 8182
    assert budget.room(10, Backlog(1, 3 * H200.max_tokens)).tokens == 8182
    assert budget.room(11, Backlog(1, 3 * H200.max_tokens)).tokens == 2048
    assert budget.room(10, LARGE).tokens == 8182
    assert budget.room(10, Backlog(64, H200.max_tokens)).tokens == 2048
    assert budget.room(10, less).tokens == 2048


def test_a_full_step_is_limited_by_its_context_and_teaches_nothing() -> None:
    room = StepBudget(H200.__class__(8192, 2048, 0.050, waiting_served_ratio=0.3)).room(10, LARGE)
    count = room.offer(32_768, 24_000)
    assert 4000 <= count <= 4200
    room.spend(count, 32_768, 24_000)
    assert room.num_units > 8000
    assert room.learnable_units == 0
