"""What OpenAI's way asks of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import FinishReason, GenerationRequest, StepPlan, StepResult
from tests.fakes import FakeShard, Simulation, expected_tokens

LIMITS = SchedulerLimits(num_blocks=65, block_size=4, max_rows=8, max_step_tokens=32)
PROMPT = list(range(11))


def request(request_id: int = 1, **more: object) -> GenerationRequest:
    return GenerationRequest(request_id, PROMPT, 10, **more)  # type: ignore[arg-type]


def run(*requests: GenerationRequest, limits: SchedulerLimits = LIMITS) -> Simulation:
    simulation = Simulation(limits)
    for each in requests:
        simulation.submit(each)
        simulation.run()
    return simulation


def test_a_stop_token_ends_its_request_and_no_other() -> None:
    undisturbed = expected_tokens(request(), 50)
    stop = undisturbed[3]
    simulation = run(request(1, stop_token_ids=frozenset({stop})), request(2))
    assert simulation.tokens(1) == undisturbed[: undisturbed.index(stop) + 1]
    assert simulation.outputs[1][-1].finish_reason is FinishReason.STOP_SEQUENCE
    assert simulation.tokens(2) == undisturbed


def test_nothing_but_the_length_ends_a_request_before_its_minimum() -> None:
    undisturbed = expected_tokens(request(), 50)
    every_token = frozenset(range(50))
    for limits, more in ((LIMITS, {"stop_token_ids": every_token}), (_ending_with(every_token), {})):
        simulation = run(request(1, min_new_tokens=4, **more), limits=limits)
        assert simulation.tokens(1) == undisturbed[:5], "four, and the fifth may end it"


def _ending_with(tokens: frozenset[int]) -> SchedulerLimits:
    return SchedulerLimits(num_blocks=65, block_size=4, max_rows=8, max_step_tokens=32, eos_token_ids=tokens)


def test_the_first_token_tells_how_much_was_cached() -> None:
    simulation = run(request(1), request(2))
    assert [output.num_cached for output in simulation.outputs[1][:2]] == [0, 0]
    assert [output.num_cached for output in simulation.outputs[2][:2]] == [8, 0]


@dataclass
class ScoringShard(FakeShard):
    """Gives the likeliest tokens of every place in a prompt: here, the position."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        for row, logprobs in result.prompt_logprobs.items():
            result.prompt_top_tokens[row] = [[(int(-logprob), logprob)] for logprob in logprobs]
        return result


def test_top_tokens_of_a_prompt_are_gathered_over_its_chunks() -> None:
    simulation = Simulation(SchedulerLimits(num_blocks=65, block_size=4, max_rows=3, max_step_tokens=4))
    simulation.shard = ScoringShard(4)
    simulation.submit(request(prompt_logprobs=True))
    simulation.run()
    first, second, *_ = simulation.outputs[1]
    assert first.prompt_top_tokens == [None, *([(place, -float(place))] for place in range(10))]
    assert second.prompt_top_tokens is None


def test_prompt_logprobs_survive_a_preemption_while_the_last_chunk_computes() -> None:
    scheduler, shard = Scheduler(LIMITS), ScoringShard(4)
    scheduler.submit(request(prompt_logprobs=True))
    plan = scheduler.plan()
    assert plan is not None
    scheduler._preempt(scheduler.running[0])
    ((_, output),) = scheduler.complete(shard.run(plan))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_top_tokens is not None and len(output.prompt_top_tokens) == len(PROMPT)
