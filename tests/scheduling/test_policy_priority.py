"""Priorities: who is admitted first, who is preempted last, and how long the others can be kept waiting."""

from __future__ import annotations

import pytest

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.queue import AGING_SECONDS
from legato.scheduling.state import GenerationRequest
from tests.fakes import Simulation, check_blocks, expected_tokens


def limits(**changes: int) -> SchedulerLimits:
    defaults = {"num_blocks": 65, "block_size": 4, "max_rows": 1, "max_step_tokens": 32}
    return SchedulerLimits(**{**defaults, **changes})  # type: ignore[arg-type]


def request(request_id: int, priority: int = 5, length: int = 3, max_new_tokens: int = 2) -> GenerationRequest:
    prompt = [(request_id * 7 + i) % 50 for i in range(length)]
    return GenerationRequest(request_id, prompt, max_new_tokens, priority=priority)


def admitted(simulation: Simulation) -> list[int]:
    """Everybody, in the order in which they got a row."""
    order = []
    while simulation.launch() or simulation.in_flight:
        order += [admission.request.id for admission in simulation.in_flight[0].admitted]
        simulation.land()
    return order


def submit(simulation: Simulation, request: GenerationRequest, now: float) -> None:
    simulation.outputs[request.id] = []
    simulation.scheduler.submit(request, now)


def test_the_smaller_number_is_admitted_first_and_equals_as_they_came() -> None:
    simulation = Simulation(limits(), depth=1)
    for number, priority in enumerate([5, 9, 0, 5, 0, 4]):
        submit(simulation, request(number, priority), now=number)
    assert admitted(simulation) == [2, 4, 5, 0, 3, 1]


@pytest.mark.parametrize(("waited", "first"), [(1.9, 2), (2.1, 1)])
def test_a_level_is_worth_a_certain_time_of_waiting(waited: float, first: int) -> None:
    simulation = Simulation(limits(), depth=1)
    submit(simulation, request(1, priority=7), now=100.0)
    submit(simulation, request(2, priority=5), now=100.0 + waited * AGING_SECONDS)
    assert admitted(simulation)[0] == first


def test_the_least_urgent_request_gets_through_a_flood_of_the_most_urgent() -> None:
    """One step a second, and a request of priority 0 at every step, which is all that the server can do."""
    simulation = Simulation(limits(), depth=1)
    submit(simulation, request(0, priority=9, max_new_tokens=1), now=0.0)
    for now in range(1, 1000):
        submit(simulation, request(now, priority=0, max_new_tokens=1), now=now)
        simulation.launch()
        simulation.land()
        if simulation.outputs[0]:
            break
    assert 9 * AGING_SECONDS <= now <= 9 * AGING_SECONDS + 2


def test_an_old_request_pulls_its_level_up_and_not_only_itself() -> None:
    """Otherwise whoever fills the queue first would be before everybody else of the same priority."""
    simulation = Simulation(limits(), depth=1)
    submit(simulation, request(1, priority=6), now=0.0)
    late = 2 * AGING_SECONDS
    submit(simulation, request(2, priority=6), now=late)
    submit(simulation, request(3, priority=5), now=late)
    assert admitted(simulation) == [1, 3, 2]


def test_memory_is_taken_from_the_least_urgent() -> None:
    simulation = Simulation(limits(num_blocks=13, max_rows=3))
    urgent = [request(1, 5, 9, 25), request(3, 0, 9, 25)]
    patient = request(2, 9, 9, 25)
    for each in (urgent[0], patient, urgent[1]):
        submit(simulation, each, now=each.id)
    epochs = {}
    while simulation.launch() or simulation.land():
        epochs |= {entry.id: entry.epoch for entry in simulation.scheduler.running}
        check_blocks(simulation.scheduler)
    assert epochs[3] == 1, "never preempted, though it came last"
    assert epochs[2] > 1
    for each in (*urgent, patient):
        assert simulation.tokens(each.id) == expected_tokens(each, 50)


def test_an_urgent_request_does_not_wait_for_the_rest_of_a_long_prompt() -> None:
    simulation = Simulation(limits(max_rows=2, max_step_tokens=8), depth=1)
    submit(simulation, request(1, 5, length=30), now=0.0)
    simulation.launch()
    simulation.land()
    submit(simulation, request(2, 0, length=4), now=1.0)
    simulation.launch()
    simulation.land()
    assert simulation.outputs[2] and not simulation.outputs[1]
