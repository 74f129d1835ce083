"""The engine without a model: the scheduler never breaks the contract, and whoever does is told."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.router.shards import _from_pb, _to_pb
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from legato.server.fake.shard import BrokenContract, FakeEngine, FakeLimits
from tests.generation import generation, sampling

VOCAB = 100
WORDS = list(range(10, 90))


def make_engine(num_blocks: int = 32, block_size: int = 4, max_rows: int = 4) -> FakeEngine:
    return FakeEngine(FakeLimits(num_blocks, block_size, max_rows, 64, 16, VOCAB), WORDS)


class Server:
    """Scheduler and fake engine with two steps in flight, as the router runs them."""

    def __init__(self, num_blocks: int = 32, max_rows: int = 4, prefix_caching: bool = True) -> None:
        self.scheduler = Scheduler(SchedulerLimits(num_blocks, 4, max_rows, 16, frozenset({2}), prefix_caching))
        self.engine = make_engine(num_blocks, 4, max_rows)
        self.outputs: dict[int, list[Output]] = {}
        self._answers: list[pb.StepResponse] = []

    def submit(self, request: GenerationRequest) -> None:
        self.outputs[request.id] = []
        self.scheduler.submit(request)

    def step(self) -> bool:
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.plan()) is not None:
            self._answers.append(self.engine.run(_to_pb(plan)))
        if not self._answers:
            return False
        for request_id, output in self.scheduler.complete(_from_pb(self._answers.pop(0))):
            self.outputs[request_id].append(output)
        return True

    def run(self, *requests: GenerationRequest) -> list[list[int]]:
        for request in requests:
            self.submit(request)
        while self.step():
            pass
        return [[output.token_id for output in self.outputs[request.id]] for request in requests]


def test_the_scheduler_keeps_the_contract_under_pressure() -> None:
    """Preemption, prefix hits, chunks, cancellations: any of them wrong would raise BrokenContract."""
    rng, server = random.Random(0), Server(num_blocks=14)
    beginnings = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(2)]
    for number in range(120):
        prompt = rng.choice(beginnings)[: rng.randrange(1, 9)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(9))]
        server.submit(generation(number, prompt, rng.randrange(1, 24)))
        for _ in range(rng.randrange(6)):
            server.step()
        if rng.random() < 0.1:
            server.scheduler.cancel(rng.randrange(number + 1))
    while server.step():
        pass
    assert server.scheduler.stats.preemptions > 5
    assert server.scheduler.stats.cached_tokens > 100


def test_a_request_gets_the_same_tokens_whatever_runs_beside_it() -> None:
    request = generation(1, [5, 6, 7], 20)
    others = [generation(number, [number, 9], 24) for number in range(2, 8)]
    (alone,) = Server().run(request)
    crowded = Server(num_blocks=10)
    assert crowded.run(*others[:3], request, *others[3:])[3] == alone
    assert crowded.scheduler.stats.preemptions > 0


def test_tokens_are_words_and_differ_between_prompts() -> None:
    first, second = Server().run(generation(1, [5, 6], 20), generation(2, [6, 5], 20))
    assert set(first) | set(second) <= set(WORDS)
    assert first != second


def test_only_those_who_sample_see_their_seed() -> None:
    greedy = [generation(number, [5], 8, sampling(seed=number)) for number in (1, 2)]
    sampled = [generation(number, [5], 8, sampling(do_sample=True, seed=number)) for number in (3, 4)]
    texts = Server().run(*greedy, *sampled)
    assert texts[0] == texts[1]
    assert texts[2] != texts[3]


def test_prompts_and_tokens_have_the_figures_that_were_asked_for() -> None:
    server = Server()
    server.run(generation(1, list(range(20)), 3, top_n_tokens=2, prompt_logprobs=True))
    first = server.outputs[1][0]
    assert first.prompt_logprobs is not None and first.prompt_top_tokens is not None
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(first.prompt_top_tokens) == 20
    assert [top and top[0] for top in first.prompt_top_tokens][1:] == list(
        zip(range(1, 20), first.prompt_logprobs[1:], strict=True)
    )
    for output in server.outputs[1]:
        assert output.top_tokens is not None
        assert output.top_tokens[0] == (output.token_id, output.logprob)
        assert output.top_tokens[1][1] < output.logprob <= 0


# ---- what breaks the contract ---------------------------------------------------------------------------------------


def admission(row: int = 0, num_tokens: int = 6, **changes: object) -> pb.Admission:
    return pb.Admission(**{"row": row, "input_ids": pack_token_ids(range(1, num_tokens + 1)), **changes})


def first_step(**changes: object) -> pb.StepRequest:
    """Row 0 computes its six tokens in blocks 1 and 2."""
    settings = {"id": 1, "admitted": [admission()], "rows": [0], "num_tokens": [6], "num_new_blocks": [2]}
    return pb.StepRequest(**{**settings, "new_blocks": [1, 2], **changes})


def decode(**changes: object) -> pb.StepRequest:
    return pb.StepRequest(**{"id": 2, "rows": [0], "num_tokens": [1], "num_new_blocks": [0], **changes})


def beside(block: int) -> pb.StepRequest:
    """Row 1 enters with one token while row 0 decodes in block 2."""
    newcomer = admission(1, num_tokens=1)
    return decode(admitted=[newcomer], rows=[0, 1], num_tokens=[1, 1], num_new_blocks=[0, 1], new_blocks=[block])


def cached(input_ids: list[int]) -> pb.StepRequest:
    newcomer = pb.Admission(row=1, input_ids=pack_token_ids(input_ids), num_cached=4, blocks=[1])
    return decode(admitted=[newcomer], rows=[1], num_tokens=[1], num_new_blocks=[1], new_blocks=[3])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: first_step(num_tokens=[6, 1]), "all must have the same length"),
        (lambda: pb.StepRequest(id=1), "has no rows"),
        (lambda: first_step(rows=[0, 0], num_tokens=[3, 3], num_new_blocks=[1, 1]), "twice"),
        (lambda: first_step(new_blocks=[1]), "1 new blocks"),
        (lambda: first_step(admitted=[]), "never admitted"),
        (lambda: first_step(admitted=[admission(4)], rows=[4]), "row 4 is beyond the 4 rows"),
        (lambda: first_step(admitted=[admission(input_ids=b"")]), "0 of 0 tokens"),
        (lambda: first_step(admitted=[admission(num_generated=6)]), "6 of 6 tokens were generated"),
        (lambda: first_step(admitted=[admission(input_ids=pack_token_ids([1, VOCAB]))]), "outside the vocabulary"),
        (lambda: first_step(admitted=[admission(num_cached=8, blocks=[1, 2])]), "nothing is left"),
        (lambda: first_step(admitted=[admission(num_cached=3, blocks=[1])]), "3 cached tokens in 1 blocks"),
        (lambda: first_step(num_tokens=[7]), "asked to compute 7 tokens, 6 are left"),
        (lambda: first_step(num_tokens=[0]), "asked to compute 0 tokens"),
        (lambda: first_step(num_new_blocks=[1], new_blocks=[1]), "no room for 6 tokens"),
        (lambda: first_step(new_blocks=[0, 1]), "block 0 is not"),
        (lambda: first_step(new_blocks=[1, 32]), "block 32 is not"),
        (lambda: first_step(admitted=[admission(num_tokens=17)], num_tokens=[17]), "17 tokens; warm-up allowed 16"),
    ],
)
def test_a_first_step_that_breaks_the_contract_is_refused(make: Callable[[], pb.StepRequest], words: str) -> None:
    with pytest.raises(BrokenContract, match=words):
        make_engine().run(make())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: decode(num_tokens=[2]), "asked to compute 2 tokens, 1 are left"),
        (lambda: beside(block=2), "block 2 is written by two rows"),
        (lambda: cached([1, 2, 3, 9, 5]), "block 1 is said to be cached and holds other tokens"),
    ],
)
def test_a_later_step_that_breaks_the_contract_is_refused(make: Callable[[], pb.StepRequest], words: str) -> None:
    engine = make_engine()
    engine.run(first_step())
    with pytest.raises(BrokenContract, match=words):
        engine.run(make())


@pytest.mark.parametrize("make", [decode, lambda: beside(block=3), lambda: cached([1, 2, 3, 4, 5])])
def test_the_same_steps_done_right_are_taken(make: Callable[[], pb.StepRequest]) -> None:
    engine = make_engine()
    engine.run(first_step())
    assert engine.run(make()).token_ids


def test_a_block_that_was_written_again_is_no_longer_cached() -> None:
    engine = make_engine()
    engine.run(first_step())
    other = pb.Admission(row=2, input_ids=pack_token_ids([9] * 2))
    engine.run(decode(admitted=[other], rows=[2], num_tokens=[2], num_new_blocks=[1], new_blocks=[1]))
    with pytest.raises(BrokenContract, match="holds other tokens"):
        engine.run(cached([1, 2, 3, 4, 5]))


def test_a_sequence_longer_than_warm_up_allowed_is_refused() -> None:
    engine = FakeEngine(FakeLimits(32, 4, 4, 6, None, VOCAB), WORDS)
    engine.run(first_step())
    with pytest.raises(BrokenContract, match="the longest sequence has 6"):
        engine.run(decode())
