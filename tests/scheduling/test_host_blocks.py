"""Blocks of evicted prefixes in host memory. The fake shard checks that every context holds the tokens it should."""

from __future__ import annotations

import pytest

from legato.scheduling.host_blocks import HostBlocks
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.prefix_tree import PrefixTree
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


def test_what_came_back_is_copied_out_only_once() -> None:
    """Full blocks do not change, and their slots are not needed for others."""
    shards = simulation(100)
    copied = []
    for turn in range(3):
        plans = [plan for number in range(4) for plan in answer(shards, 4 * turn + number, [*PROMPTS[number], turn])]
        copied.append(sum(len(plan.copies_out) for plan in plans))
        assert turn == 0 or sum(len(plan.copies_in) for plan in plans) > 20
    assert copied[0] > 20 and copied[2] == 0


@pytest.mark.parametrize("num_slots", [1, 7, 8, 9, 16, 24, 31, 32])
def test_contexts_are_right_however_many_slots_there_are(num_slots: int) -> None:
    shards = simulation(num_slots)
    for number in range(16):
        answer(shards, number, [*PROMPTS[number % 4], number])
        assert len(shards.scheduler.host) <= num_slots


def test_what_came_back_makes_room_before_others() -> None:
    tree, host = PrefixTree(1), HostBlocks(2, 1)
    root, keys = tree.root(), [number.to_bytes(8, "little") for number in range(3)]

    def evict(number: int) -> None:
        node, _ = tree.extend(root, keys[number], 10 + number)
        tree.unlock(node)
        tree.evict(1, host.keep)

    evict(0)
    evict(1)
    assert host.take_copies() == ([(10, 0), (11, 1)], [])
    host.land([(10, 0), (11, 1)], failed=False)
    (came_back,) = host.reserve(host.match(root, keys[1], 0, 1))
    host.add_copies_in([came_back], [20])
    assert host.take_copies() == ([], [(1, 20)])
    evict(2)
    assert host.take_copies() == ([(12, 1)], [])
    host.land([], failed=False)
    host.land([(12, 1)], failed=False)
    assert [len(host.match(root, key, 0, 1)) for key in keys] == [1, 0, 1]


@pytest.mark.parametrize("fields", [{"tenant": "b"}, {"prompt_logprobs": True}])
def test_others_do_not_find_it(fields: dict[str, object]) -> None:
    shards = simulation(100)
    for number in range(4):
        answer(shards, number, PROMPTS[number], tenant="a")
    assert num_cached(answer(shards, 4, [*PROMPTS[0], 7], **fields)) == 0
    assert num_cached(answer(shards, 5, [*PROMPTS[0], 7], tenant="a")) == 32


def test_adapters_do_not_find_each_others() -> None:
    tree, host, key = PrefixTree(1), HostBlocks(4, 1), (5).to_bytes(8, "little")
    node, _ = tree.extend(tree.root("a", 1), key, 9)
    tree.unlock(node)
    tree.evict(1, host.keep)
    assert host.take_copies() == ([(9, 0)], [])
    host.land([(9, 0)], failed=False)
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
    shards.scheduler.host.land(plan.copies_out, failed=True)
    assert len(shards.scheduler.host) == before


@pytest.mark.parametrize("failed", [False, True])
def test_a_block_comes_back_once_it_is_known_to_have_left(*, failed: bool) -> None:
    """The next step is planned before that is known, and would read what somebody else has left in the slot."""
    tree, host, key = PrefixTree(1), HostBlocks(1, 1), (5).to_bytes(8, "little")
    node, _ = tree.extend(tree.root(), key, 9)
    tree.unlock(node)
    tree.evict(1, host.keep)
    out, _ = host.take_copies()
    assert out == [(9, 0)]
    assert host.match(tree.root(), key, 0, 1) == [] and host.take_copies() == ([], [])
    host.land(out, failed=failed)
    assert len(host.match(tree.root(), key, 0, 1)) == (0 if failed else 1)
