"""Encoder-decoder models: a prompt is computed whole, then one token with which the decoder starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from legato.common.errors import OptionError
from legato.common.options import RouterOptions
from legato.pb import generate_pb2 as pb
from legato.router.cli import settings_for, warm_up
from legato.router.shards import WarmupLimits
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, StepPlan
from tests.fakes import Simulation, check_blocks, expected_tokens

VOCAB, START = 50, 7


def limits(**changes: object) -> SchedulerLimits:
    defaults: dict[str, object] = dict(
        num_blocks=65, block_size=4, max_rows=4, max_step_tokens=32, prefix_caching=False, decoder_start_token_id=START
    )
    return SchedulerLimits(**{**defaults, **changes})  # type: ignore[arg-type]


def request(request_id: int, length: int, max_new_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(request_id, [request_id + i for i in range(length)], max_new_tokens)


def expected(wanted: GenerationRequest) -> list[int]:
    return expected_tokens(structs.replace(wanted, input_ids=[*wanted.input_ids, START]), VOCAB)


def first_plan(scheduler: Scheduler, *requests: GenerationRequest) -> StepPlan:
    for each in requests:
        scheduler.submit(each)
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_the_start_token_stands_behind_the_prompt_and_is_no_part_of_the_request() -> None:
    wanted = request(1, 3)
    (admission,) = first_plan(Scheduler(limits()), wanted).admitted
    assert admission.input_ids.tolist() == [1, 2, 3, START] and admission.num_generated == 0
    assert wanted.input_ids == [1, 2, 3]


def test_tokens_are_those_that_follow_the_start_token() -> None:
    simulation, wanted = Simulation(limits()), [request(i, 5 + i) for i in range(6)]
    for each in wanted:
        simulation.submit(each)
    simulation.run()
    assert {i: simulation.tokens(i) for i in range(6)} == {each.id: expected(each) for each in wanted}


def test_a_prompt_that_does_not_fit_into_the_rest_of_a_step_waits_for_the_next() -> None:
    scheduler = Scheduler(limits())
    plan = first_plan(scheduler, request(1, 14), request(2, 14), request(3, 14))
    assert plan.num_tokens == [15, 15]
    following = scheduler.plan()
    assert following is not None and following.num_tokens == [1, 1, 15]


def test_a_small_prompt_does_not_overtake_one_that_waits_for_room() -> None:
    scheduler = Scheduler(limits())
    plan = first_plan(scheduler, request(1, 9), request(2, 28), request(3, 1))
    assert [admission.request.id for admission in plan.admitted] == [1]
    following = scheduler.plan()
    assert following is not None and [admission.request.id for admission in following.admitted] == [2, 3]


def test_the_longest_prompt_gets_its_turn_while_all_other_rows_decode() -> None:
    scheduler = Scheduler(limits())
    first_plan(scheduler, request(1, 3, 90), request(2, 3, 90), request(3, 3, 90), request(4, 28))
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens == [1, 1, 1, 29]


def test_a_pace_for_prompts_beside_decodes_keeps_no_prompt_waiting() -> None:
    scheduler = Scheduler(limits(max_mixed_tokens=8, mixed_step_time=0.01))
    first_plan(scheduler, request(1, 3, 90))
    scheduler.submit(request(2, 20))
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens == [1, 21]


def test_after_a_preemption_the_prompt_is_whole_and_the_answer_may_be_cut() -> None:
    simulation = Simulation(limits(num_blocks=17, max_step_tokens=20), depth=1)
    wanted = [request(i, 10, 30) for i in range(3)]
    for each in wanted:
        simulation.submit(each)
    readmitted = []
    while simulation.launch():
        plan = simulation.in_flight[0]
        count_of = dict(zip(plan.rows, plan.num_tokens, strict=True))
        for admission in plan.admitted:
            assert count_of[admission.row] >= 11, "the encoder reads all of the prompt at once"
            if count_of[admission.row] < len(admission.input_ids):
                readmitted.append(admission)
        simulation.land()
        check_blocks(simulation.scheduler)
    assert simulation.scheduler.stats.preemptions and readmitted, "the test meant to cut an answer"
    assert {i: simulation.tokens(i) for i in range(3)} == {each.id: expected(each) for each in wanted}


def test_prompt_and_answer_may_fill_the_cache_to_the_last_slot() -> None:
    simulation, wanted = Simulation(limits(num_blocks=9)), request(1, 20, 12)
    simulation.submit(wanted)
    simulation.run()
    assert simulation.tokens(1) == expected(wanted)


def test_equal_prompts_share_nothing() -> None:
    simulation = Simulation(limits())
    for i in range(2):
        simulation.submit(GenerationRequest(i, list(range(12)), 4))
        simulation.run()
    assert simulation.scheduler.stats.cached_tokens == 0 and len(simulation.scheduler.tree) == 0


# ---- limits ---------------------------------------------------------------------------------------------------------


class Shards:
    """Answers with what it is asked for."""

    def __init__(self) -> None:
        self.asked: WarmupLimits | None = None

    async def warmup(self, limits: WarmupLimits) -> pb.WarmupResponse:
        self.asked = limits
        total = limits.max_total_tokens or 4096
        return pb.WarmupResponse(
            max_input_tokens=limits.max_input_tokens or total - 1,
            max_total_tokens=total,
            num_blocks=1025,
            max_rows=limits.max_rows,
        )


INFO = pb.InfoResponse(device_type="cpu", block_size=16, vocab_size=VOCAB, decoder_start_token_id=START)


def limits_for(options: RouterOptions) -> tuple[WarmupLimits, SchedulerLimits, int]:
    shards = Shards()
    scheduler, limits = asyncio.run(warm_up(shards, INFO, options))  # type: ignore[arg-type]
    assert shards.asked is not None
    return shards.asked, scheduler.limits, limits.max_input_tokens


def test_prompts_that_no_step_can_hold_are_refused() -> None:
    asked, scheduler, max_input_tokens = limits_for(
        RouterOptions(max_batch_prefill_tokens=64, max_concurrent_requests=9)
    )
    assert max_input_tokens == 63
    assert asked.max_prefill_tokens == scheduler.max_step_tokens == 64 + 9
    assert scheduler.decoder_start_token_id == START


def test_a_step_grows_to_the_longest_input_that_somebody_asks_for() -> None:
    asked, _, max_input_tokens = limits_for(RouterOptions(max_input_tokens=2000, max_concurrent_requests=9))
    assert (max_input_tokens, asked.max_prefill_tokens) == (2000, 2001 + 9)


def test_a_step_too_small_for_the_longest_input_is_an_error_that_names_both_flags() -> None:
    with pytest.raises(OptionError, match=r"--max-batch-prefill-tokens is 64.* 101, .*--max-input-tokens"):
        limits_for(RouterOptions(max_batch_prefill_tokens=64, max_input_tokens=100))


def test_the_compatible_route_leaves_the_prompt_out_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = RouterOptions(model_id=str(tmp_path))
    assert not settings_for(options, INFO, {}, tmp_path).default_return_full_text
    assert settings_for(options, pb.InfoResponse(), {}, tmp_path).default_return_full_text
