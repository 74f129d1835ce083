"""New shards take the place of lost ones: every request goes on with the tokens that its client has seen."""

from __future__ import annotations

import pytest

from legato.scheduling.limits import MAX_LOSSES, Refusal
from legato.scheduling.state import GenerationRequest
from tests.fakes import Simulation, check_blocks, expected_tokens
from tests.scheduling.test_scheduler import VOCAB, limits, request


def started(*requests: GenerationRequest, steps: int = 3, **changes: object) -> Simulation:
    """After some steps, with two more in flight."""
    simulation = Simulation(limits(**changes))
    for each in requests:
        simulation.submit(each)
    for _ in range(steps):
        simulation.launch()
        simulation.launch()
        simulation.land()
    simulation.launch()
    return simulation


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_no_token_is_lost_or_repeated(steps: int) -> None:
    wanted = [request(number, list(range(number, number + 11))) for number in range(12)]
    simulation = started(*wanted, steps=steps)
    simulation.lose()
    check_blocks(simulation.scheduler)
    assert (simulation.scheduler.num_in_flight, simulation.scheduler.kv_usage) == (0, 0)
    simulation.run()
    for each in wanted:
        assert simulation.tokens(each.id) == expected_tokens(each, VOCAB)


def test_those_who_ran_run_again_before_those_who_waited() -> None:
    simulation = started(*(request(number, [number] * 5) for number in range(6)), max_rows=3)
    running = [entry.id for entry in simulation.scheduler.running]
    simulation.lose()
    assert simulation.launch()
    assert [admission.request.id for admission in simulation.in_flight[-1].admitted] == running


def test_prompt_logprobs_come_once() -> None:
    """With the first token, before the loss or after it."""
    for steps in (1, 3):
        wanted = request(1, list(range(40)), prompt_logprobs=True)
        simulation = started(wanted, steps=steps)
        simulation.lose()
        simulation.run()
        first, *others = simulation.outputs[1]
        assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 40
        assert all(output.prompt_logprobs is None for output in others)
        assert simulation.tokens(1) == expected_tokens(wanted, VOCAB)


def test_what_no_longer_fits_ends_with_an_error_and_so_do_newcomers_that_do_not_fit() -> None:
    short, long = request(1, [1] * 5, 10), request(2, [2] * 60, 40)
    simulation = started(short, long, max_requests=9, max_queued_tokens=999)
    simulation.lose(limits(num_blocks=17))
    shares = simulation.scheduler.shares
    assert simulation.outputs[2][-1].error == Refusal.DOES_NOT_FIT
    simulation.run()
    assert simulation.tokens(1) == expected_tokens(short, VOCAB)
    refused = simulation.scheduler.submit(request(3, [3] * 60, 40))
    assert refused is not None and refused.error == Refusal.DOES_NOT_FIT
    assert (shares.permits.free, shares.queued_tokens.free) == (9, 999)
    check_blocks(simulation.scheduler)


def test_a_request_that_the_shards_die_of_is_not_tried_for_ever() -> None:
    poison, waiting = request(1, [1] * 5), request(2, [2] * 5)
    simulation = started(poison, waiting, steps=0, max_rows=1)
    for _ in range(MAX_LOSSES):
        simulation.lose()
        assert simulation.launch()
    simulation.lose()
    assert [output.error for output in simulation.outputs[1]] == [Refusal.LOST_TOO_OFTEN.format(MAX_LOSSES + 1)]
    simulation.run()
    assert simulation.tokens(2) == expected_tokens(waiting, VOCAB)


def test_a_request_that_gets_tokens_between_losses_survives_any_number_of_them() -> None:
    wanted = request(1, [1] * 5, 20)
    simulation = started(wanted, steps=0)
    for _ in range(3 * MAX_LOSSES):
        simulation.land()
        simulation.launch()
        simulation.lose()
        simulation.launch()
    simulation.run()
    assert simulation.tokens(1) == expected_tokens(wanted, VOCAB)
