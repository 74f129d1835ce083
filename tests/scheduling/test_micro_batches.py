"""Steps of a pipeline: rows are divided among them, so that stages compute at the same time."""

from __future__ import annotations

import random
from collections import Counter

from legato.scheduling.limits import SchedulerLimits
from tests.fakes import Simulation, check_blocks, expected_tokens
from tests.scheduling.test_scheduler import VOCAB, request


def limits(num_stages: int, **changes: int) -> SchedulerLimits:
    sizes = dict(num_blocks=257, block_size=4, max_rows=16, max_step_tokens=64) | changes
    return SchedulerLimits(**sizes, num_stages=num_stages)


def pipeline(num_stages: int, **changes: int) -> Simulation:
    found = limits(num_stages, **changes)
    return Simulation(found, VOCAB, depth=found.max_in_flight)


def test_steps_in_flight_decode_different_rows() -> None:
    simulation = pipeline(2)
    for number in range(8):
        simulation.submit(request(number, [number] * 3, 40))
    for _ in range(12):
        while simulation.launch():
            pass
        simulation.land()
    for first, second in zip(simulation.in_flight, simulation.in_flight[1:], strict=False):
        assert not set(first.rows) & set(second.rows)
        assert len(first.rows) == len(second.rows) == 4


def test_every_row_gets_its_turn_while_others_come_and_go() -> None:
    rng, simulation = random.Random(3), pipeline(3)
    asked = [request(number, [number, 7] * rng.randint(1, 20), rng.randint(1, 30)) for number in range(40)]
    for each in asked:
        simulation.submit(each)
        if rng.random() < 0.5:
            while simulation.launch():
                pass
            simulation.land()
        check_blocks(simulation.scheduler)
    simulation.run()
    for each in asked:
        assert simulation.tokens(each.id) == expected_tokens(each, VOCAB)


def test_a_row_alone_is_one_step_ahead_and_no_further() -> None:
    simulation = pipeline(4)
    simulation.submit(request(1, [5, 6], 20))
    while simulation.launch():
        pass
    assert len(simulation.in_flight) == 2
    simulation.run()
    assert simulation.tokens(1) == expected_tokens(request(1, [5, 6], 20), VOCAB)


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    simulation = pipeline(3, max_step_tokens=16)
    simulation.submit(request(1, list(range(60)), 2))
    while simulation.launch():
        pass
    assert [sum(plan.num_tokens) for plan in simulation.in_flight] == [16, 16, 16, 12]


def test_rows_are_preempted_and_go_on_with_the_same_tokens() -> None:
    simulation = pipeline(2, num_blocks=33)
    asked = [request(number, [number] * 10, 30) for number in range(12)]
    for each in asked:
        simulation.submit(each)
    simulation.run()
    assert simulation.scheduler.stats.preemptions
    counts = Counter({each.id: len(simulation.tokens(each.id)) for each in asked})
    assert set(counts.values()) == {30}
    assert all(simulation.tokens(each.id) == expected_tokens(each, VOCAB) for each in asked)
