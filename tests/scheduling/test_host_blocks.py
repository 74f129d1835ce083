"""Blocks of evicted prefixes in host memory. The fake shard checks that every context holds the tokens it should."""

from __future__ import annotations

import pytest

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import GenerationRequest, StepPlan
from tests.fakes import Simulation, check_blocks, expected_tokens

PROMPTS = [[100 * number + at for at in range(32)] for number in range(4)]


def simulation(num_host_blocks: int, **changes: bool) -> Simulation:
    """Room for one conversation of eight blocks, and a little more."""
    limits = SchedulerLimits(12, 4, 4, 64, num_host_blocks=num_host_blocks, **changes)  # type: ignore[arg-type]
    return Simulation(limits, vocab=50, depth=1)


def answer(simulation: Simulation, number: int, prompt: list[int], **fields: object) -> list[StepPlan]:
    """Its plans."""
    request = GenerationRequest(number, prompt, 2, **fields)  # type: ignore[arg-type]
    simulation.submit(request)
    plans = []
    while simulation.launch():
        plans += simulation.in_flight
        simulation.land()
    assert simulation.tokens(number) == expected_tokens(request, 50)
    check_blocks(simulation.scheduler)
    return plans


def num_cached(plans: list[StepPlan]) -> int:
    return plans[0].admitted[0].num_cached


def test_an_evicted_prefix_comes_back() -> None:
    shards = simulation(100)
    for number in range(4):
        assert num_cached(answer(shards, number, PROMPTS[number])) == 0
    plans = answer(shards, 4, [*PROMPTS[0], 7])
    assert num_cached(plans) == 32
    assert len(plans[0].copies_in) == 8
    assert sum(plans[0].num_tokens) == 1
    # Its blocks are in the tree now, as if they had been computed.
    again = answer(shards, 5, [*PROMPTS[0], 8])
    assert num_cached(again) == 32 and not again[0].copies_in


def test_without_slots_it_is_computed_again() -> None:
    shards = simulation(0)
    for number in range(4):
        plans = answer(shards, number, PROMPTS[number])
        assert not any(plan.copies_out for plan in plans)
    assert num_cached(answer(shards, 4, [*PROMPTS[0], 7])) == 0


def test_the_oldest_blocks_make_room() -> None:
    """Eight slots hold about one conversation: the first is gone, the last but one is there."""
    shards = simulation(8)
    for number in range(4):
        answer(shards, number, PROMPTS[number])
    assert num_cached(answer(shards, 4, [*PROMPTS[0], 7])) == 0
    assert len(shards.scheduler.host) <= 8


@pytest.mark.parametrize("fields", [{"tenant": "b"}, {"prompt_logprobs": True}])
def test_others_do_not_find_it(fields: dict[str, object]) -> None:
    shards = simulation(100)
    for number in range(4):
        answer(shards, number, PROMPTS[number], tenant="a")
    assert num_cached(answer(shards, 4, [*PROMPTS[0], 7], **fields)) == 0
    assert num_cached(answer(shards, 5, [*PROMPTS[0], 7], tenant="a")) == 32


def test_adapters_do_not_find_each_others() -> None:
    from legato.scheduling.host_blocks import HostBlocks
    from legato.scheduling.prefix_tree import PrefixTree

    tree, host, key = PrefixTree(1), HostBlocks(4, 1), (5).to_bytes(8, "little")
    node, _ = tree.extend(tree.root("a", 1), key, 9)
    tree.unlock(node)
    tree.evict(1, host.keep)
    assert host.take_copies() == ([(9, 0)], [])
    assert host.match(tree.root("a", 2), key, 0, 1) == []
    assert len(host.match(tree.root("a", 1), key, 0, 1)) == 1


def test_new_shards_have_nothing_on_their_hosts() -> None:
    shards = simulation(100)
    for number in range(4):
        answer(shards, number, PROMPTS[number])
    shards.scheduler.restart(shards.scheduler.limits)
    shards.shard.host.clear()
    assert num_cached(answer(shards, 4, [*PROMPTS[0], 7])) == 0


def test_a_step_that_failed_copied_nothing_that_counts() -> None:
    shards = simulation(100)
    for number in range(3):
        answer(shards, number, PROMPTS[number])
    before = len(shards.scheduler.host)
    shards.submit(GenerationRequest(3, PROMPTS[3], 2))
    plan = shards.scheduler.plan()
    assert plan is not None and plan.copies_out
    shards.scheduler.host.forget(plan.copies_out)
    assert len(shards.scheduler.host) == before
