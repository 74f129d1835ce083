"""What one holder of an API key tries with another: read its prompts from the cache, take all permits, fill the
queue."""

from __future__ import annotations

import itertools
import random

import pytest

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.shares import FACTOR, Shares
from legato.scheduling.state import GenerationRequest
from tests.fakes import Simulation, check_blocks

LIMITS = SchedulerLimits(num_blocks=257, block_size=4, max_rows=4, max_step_tokens=64)
SECRET = [7, 3, 9, 1] * 6


def cached_tokens(simulation: Simulation, number: int, tokens: list[int], tenant: str) -> int:
    simulation.submit(GenerationRequest(number, tokens, 2, tenant=tenant))
    simulation.run()
    return simulation.outputs[number][0].num_cached


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_the_cache_tells_nobody_what_others_have_sent() -> None:
    """The attack: guess a prompt block by block; `cached_tokens` says how far the guess is right. All it may say is how
    much of a guess the spy has sent before."""
    guesses = [SECRET[:length] for length in range(5, len(SECRET))]

    def seen_by_spy(simulation: Simulation) -> list[int]:
        return [cached_tokens(simulation, number, guess, "spy") for number, guess in enumerate(guesses, 1)]

    simulation = Simulation(LIMITS)
    cached_tokens(simulation, 0, [*SECRET, 1], "victim")
    assert seen_by_spy(simulation) == seen_by_spy(Simulation(LIMITS))
    assert cached_tokens(simulation, 100, [*SECRET, 2], "victim") == len(SECRET)


@pytest.mark.parametrize("shared", [True, False])
def test_keys_share_the_cache_only_if_the_operator_says_so(shared: bool) -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, share_prefix_cache=shared))
    cached_tokens(simulation, 0, [*SECRET, 1], "a")
    assert cached_tokens(simulation, 1, [*SECRET, 2], "b") == (len(SECRET) if shared else 0)
    assert cached_tokens(simulation, 2, [*SECRET, 3], "b") == len(SECRET)


def test_a_prompt_that_another_key_is_computing_is_not_waited_for() -> None:
    """To be admitted a step later would tell just as much."""
    simulation = Simulation(LIMITS, depth=1)
    for number, tenant in enumerate(["a", "b", "b"]):
        simulation.submit(GenerationRequest(number, [*SECRET[:12], number], 2, tenant=tenant))
    simulation.launch()
    assert [admission.request.id for admission in simulation.in_flight[0].admitted] == [0, 1]


def test_blocks_of_all_keys_are_evicted_and_add_up() -> None:
    rng = random.Random(1)
    simulation = Simulation(SchedulerLimits(num_blocks=17, block_size=4, max_rows=4, max_step_tokens=64))
    for number in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 30))]
        simulation.submit(GenerationRequest(number, tokens, 3, tenant=rng.choice("abc")))
        if number % 3 == 0:
            simulation.run()
            check_blocks(simulation.scheduler)
    simulation.run()
    check_blocks(simulation.scheduler)


# ---- permits and the queue -------------------------------------------------------------------------------------------


def flood(simulation: Simulation, tenant: str, count: int, length: int = 8, start: int = 0) -> int:
    """How many of `count` requests are taken."""
    made = [GenerationRequest(start + number, [1] * length, 2, tenant=tenant) for number in range(count)]
    return sum(simulation.scheduler.submit(request) is None for request in made)


def test_one_key_cannot_take_all_permits() -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, max_requests=100))
    assert flood(simulation, "flood", 1000) == 80
    assert flood(simulation, "visitor", 10, start=1000) == 10


def test_keys_that_take_all_they_can_get_converge_to_equal_shares() -> None:
    shares, rng, held = Shares(1000), random.Random(2), {"first": 0, "second": 0}
    while shares.take("first", 1):
        held["first"] += 1
    for _ in range(20_000):  # both ask all the time, and what they hold ends at the same rate
        for tenant in ("first", "second"):
            if rng.random() < 0.1 and held[tenant]:
                shares.give_back(tenant, 1)
                held[tenant] -= 1
            if shares.take(tenant, 1):
                held[tenant] += 1
    assert abs(held["first"] - held["second"]) < 50
    assert sum(held.values()) > 850


def test_without_keys_there_is_one_tenant_who_may_have_everything() -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, max_requests=100))
    assert flood(simulation, "", 1000) == 100


@pytest.mark.parametrize("total", [1, 2, 3, 16])
def test_a_key_that_holds_nothing_gets_something_while_there_is_any(total: int) -> None:
    shares = Shares(total)
    assert shares.take("a", 1)
    assert not shares.free or shares.take("b", 1)


def test_the_queue_is_bounded_in_tokens() -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, max_queued_tokens=1000))
    assert flood(simulation, "", 1000, length=100) == 10
    refused = simulation.scheduler.submit(GenerationRequest(5000, [1], 2))
    assert refused is not None and refused.retry_after >= 1


def test_one_key_cannot_fill_the_queue() -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, max_queued_tokens=1000))
    assert flood(simulation, "flood", 100, length=50) == 1000 * FACTOR // (FACTOR + 1) // 50
    assert flood(simulation, "visitor", 2, length=50, start=1000) == 2


def test_a_prompt_longer_than_the_queue_is_taken_when_nobody_waits() -> None:
    simulation = Simulation(SchedulerLimits(257, 4, 4, 64, max_queued_tokens=10))
    assert flood(simulation, "a", 1, length=50) == 1
    assert flood(simulation, "b", 1, length=1, start=10) == 0


def test_tokens_and_permits_come_back_however_a_request_ends() -> None:
    """Admitted, cancelled while it waits or runs, preempted, too late."""
    limits = SchedulerLimits(17, 4, 4, 64, max_requests=50, max_queued_tokens=500, queue_timeout=5)
    simulation, rng, ids = Simulation(limits, depth=1), random.Random(3), itertools.count()
    scheduler, now = simulation.scheduler, 0.0
    for _ in range(600):
        number = next(ids)
        simulation.outputs[number] = []
        request = GenerationRequest(number, [rng.randrange(50)] * rng.randrange(1, 20), 9, tenant=rng.choice("abc"))
        scheduler.submit(request, now)
        if rng.random() < 0.3 and scheduler._entries:
            scheduler.cancel(rng.choice(list(scheduler._entries)))
        now += rng.random()
        scheduler.expire(now)
        if simulation.launch():
            simulation.land()
        waiting = [entry for entry in scheduler._entries.values() if entry.epoch == 0]
        assert scheduler.shares.queued_tokens.free == 500 - sum(entry.num_prompt for entry in waiting)
        assert scheduler.shares.permits.free == 50 - len(scheduler._entries)
    assert scheduler.stats.preemptions
