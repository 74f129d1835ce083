"""The sampler: each row gets what it asked for, whoever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from legato.sampling.randomness import counter, uniform
from legato.sampling.sampler import Sampler
from tests.sampling.asked import Asked

CPU = torch.device("cpu")
VOCAB = 211
PROMPT = [3, 50, 3, 7]
NAN, INF = float("nan"), float("inf")

EVERYTHING = Asked(
    do_sample=True,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    typical_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    watermark=True,
    seed=11,
    token_bias={5: 2.0, 9: -3.0},
    top_n_tokens=3,
)
KINDS = [
    Asked(),
    Asked(do_sample=True, seed=1),
    Asked(do_sample=True, seed=2, temperature=0.5),
    Asked(do_sample=True, seed=3, temperature=1.5, top_p=0.8),
    Asked(do_sample=True, seed=4, top_k=5),
    Asked(do_sample=True, seed=5, top_k=30, typical_p=0.5),
    Asked(do_sample=True, seed=6, min_p=0.1),
    Asked(repetition_penalty=1.5),
    Asked(frequency_penalty=0.9, top_n_tokens=2),
    Asked(presence_penalty=1.1, do_sample=True, seed=7),
    Asked(watermark=True),
    Asked(token_bias={10: 5.0}, do_sample=True, seed=8),
    EVERYTHING,
]


def logits_of(step: int, n: int = 1, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(step)) * 3


def generate(params: Asked, steps: int, generated: list[int] | None = None) -> list[int]:
    """A request alone in a sampler of its own; with `generated`, as it continues after a preemption."""
    sampler = Sampler(VOCAB, 1, CPU)
    tokens = list(generated or [])
    params.enter(sampler, 0, PROMPT, tokens)
    while len(tokens) < steps:
        tokens += sampler.sample(logits_of(len(tokens)), [0]).token_ids.tolist()
    return tokens


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# Rows and batches


@pytest.mark.parametrize("params", KINDS)
def test_a_preempted_request_continues_with_the_token_it_would_have_had(params: Asked) -> None:
    undisturbed = generate(params, 12)
    for cut in (1, 5, 11):
        assert generate(params, 12, undisturbed[:cut]) == undisturbed


@given(st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=len(KINDS), unique=True), st.randoms())
@settings(max_examples=25, deadline=None)
def test_tokens_do_not_depend_on_who_shares_the_batch(kinds: list[int], random: Any) -> None:
    sampler = Sampler(VOCAB, 20, CPU)
    row_of = dict(zip(kinds, random.sample(range(20), len(kinds)), strict=True))
    for kind in kinds:
        KINDS[kind].enter(sampler, row_of[kind], PROMPT, [])
    tokens: dict[int, list[int]] = {kind: [] for kind in kinds}
    for _ in range(8):
        batch = random.sample(kinds, random.randint(1, len(kinds)))
        logits = torch.cat([logits_of(len(tokens[kind])) for kind in batch])
        for kind, token in zip(
            batch, sampler.sample(logits, [row_of[kind] for kind in batch]).token_ids.tolist(), strict=True
        ):
            tokens[kind].append(token)
    for kind in kinds:
        assert tokens[kind] == generate(KINDS[kind], len(tokens[kind]))


def test_a_row_forgets_its_former_request() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    EVERYTHING.enter(sampler, 0, PROMPT, [])
    for step in range(5):
        sampler.sample(logits_of(step), [0])
    for params in (EVERYTHING, Asked()):
        params.enter(sampler, 0, PROMPT, [])
        assert [sampler.sample(logits_of(step), [0]).token_ids.item() for step in range(5)] == generate(params, 5)


def test_the_order_of_a_batch_may_change_between_steps() -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    Asked(token_bias={1: 100.0}).enter(sampler, 0, PROMPT, [])
    Asked(token_bias={2: 100.0}).enter(sampler, 1, PROMPT, [])
    assert sampler.sample(logits_of(0, 2), [0, 1]).token_ids.tolist() == [1, 2]
    assert sampler.sample(logits_of(0, 2), [1, 0]).token_ids.tolist() == [2, 1]


# What is chosen


def test_the_default_is_the_likeliest_token() -> None:
    logits = logits_of(0, 9)
    sampled = Sampler(VOCAB, 9, CPU).sample(logits, list(range(9)))
    assert torch.equal(sampled.token_ids, logits.argmax(-1))
    torch.testing.assert_close(sampled.logprobs, logits.log_softmax(-1).amax(-1))
    assert sampled.top is None


def expected_choice(params: Asked, logits: Tensor, generated: list[int], greens: Tensor) -> int:
    """One row by the book: transformers' processors in the documented order, then the inverse distribution function."""
    said = torch.tensor([PROMPT + generated])
    scores = logits.clone() + (2.0 * greens if params.watermark else 0.0)
    for token, bias in params.token_bias.items():
        scores[:, token] += bias
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(said, scores)
    for token in set(generated):
        scores[:, token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    if not params.do_sample:
        return int(scores.argmax())
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.typical_p < 1:
        chain.append(TypicalLogitsWarper(params.typical_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    cumulated = chain(said, scores).double().softmax(-1).cumsum(-1)
    u = uniform(torch.tensor([[counter(params.seed, len(generated))]]))
    return int(torch.searchsorted(cumulated, u, right=True))


@pytest.mark.parametrize("params", KINDS)
def test_the_choice_is_that_of_the_documented_order(params: Asked) -> None:
    tokens = generate(params, 20)
    for position, token in enumerate(tokens):
        previous = (PROMPT + tokens[:position])[-1]
        generator = torch.Generator().manual_seed(15485863 * previous)
        greens = torch.zeros(VOCAB).index_fill_(0, torch.randperm(VOCAB, generator=generator)[: VOCAB // 2], 1.0)
        assert token == expected_choice(params, logits_of(position), tokens[:position], greens)


def frequencies_are(probabilities: Tensor, params: Asked) -> bool:
    """Chi-square over many seeds, each drawing at many positions."""
    rows, positions = 500, 40
    vocab_size = probabilities.numel()
    sampler = Sampler(vocab_size, rows, CPU)
    for row in range(rows):
        replace(params, seed=row).enter(sampler, row, [0], [])
    logits = probabilities.log().expand(rows, -1)
    counts = torch.zeros(vocab_size)
    for _ in range(positions):
        counts += torch.bincount(sampler.sample(logits, list(range(rows))).token_ids, minlength=vocab_size)
    expected = probabilities.pow(1 / params.temperature)
    expected = expected / expected.sum() * rows * positions
    freedom = vocab_size - 1
    return abs(((counts - expected) ** 2 / expected).sum().item() - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    probabilities = torch.linspace(1, 9, 60).roll(17)
    assert frequencies_are(probabilities / probabilities.sum(), Asked(True, temperature))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-8])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    for seed in range(20):
        Asked(do_sample=True, temperature=temperature, seed=seed).enter(sampler, 0, PROMPT, [])
        assert sampler.sample(logits_of(seed), [0]).token_ids.item() == logits_of(seed).argmax().item()


def test_the_largest_bias_decides_alone() -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    Asked(token_bias={17: INF}).enter(sampler, 0, PROMPT, [])
    Asked(token_bias={int(logits_of(0).argmax()): -INF}).enter(sampler, 1, PROMPT, [])
    tokens = sampler.sample(logits_of(0).expand(2, -1), [0, 1]).token_ids.tolist()
    assert tokens == [17, logits_of(0).argsort(descending=True)[0, 1].item()]


# What is reported


@pytest.mark.parametrize("params", KINDS)
def test_logprobs_are_those_of_the_model(params: Asked) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    params.enter(sampler, 0, PROMPT, [])
    sampled = sampler.sample(logits_of(0), [0])
    expected = logits_of(0).log_softmax(-1)[0, sampled.token_ids]
    torch.testing.assert_close(sampled.logprobs, expected)


def test_top_tokens_come_for_the_rows_that_asked() -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    Asked(top_n_tokens=1).enter(sampler, 2, PROMPT, [])
    Asked(top_n_tokens=3, token_bias={4: 50.0}).enter(sampler, 0, PROMPT, [])
    logits = logits_of(0, 4)
    top = sampler.sample(logits, [3, 2, 1, 0]).top
    assert top is not None and top.indices == [1, 3] and top.lengths == [1, 3]
    assert top.token_ids[1].tolist() == logits[3].argsort(descending=True)[:3].tolist()
    torch.testing.assert_close(top.logprobs[1], logits[3].log_softmax(-1).sort(descending=True).values[:3])


# What may go wrong


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("value", [NAN, -INF, INF, 3e38, -3e38])
def test_any_logits_give_a_token_and_a_number(params: Asked, value: float) -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    logits = logits_of(0, 2)
    logits[0] = value
    logits[1, ::3] = value
    for row in (0, 1):
        params.enter(sampler, row, PROMPT, [])
    sampled = sampler.sample(logits, [0, 1])
    assert bool(((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all())
    assert bool(sampled.logprobs.isfinite().all())


@pytest.mark.parametrize("params", [Asked(), Asked(do_sample=True, temperature=2.0, top_p=0.9)])
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_broken_logit_is_never_chosen_and_a_broken_row_gives_token_0(params: Asked, value: float) -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    for row in (0, 1):
        params.enter(sampler, row, PROMPT, [])
    logits = torch.full((2, VOCAB), value)
    logits[1, 100:110] = 1.0
    for _ in range(20):
        tokens = sampler.sample(logits, [0, 1]).token_ids.tolist()
        assert tokens[0] == 0 and 100 <= tokens[1] < 110


@pytest.mark.parametrize("token", [VOCAB, 2**32 - 1])
def test_a_bias_for_no_token_is_refused_and_the_row_left_alone(token: int) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    Asked(token_bias={8: 100.0}).enter(sampler, 0, PROMPT, [])
    with pytest.raises(ValueError, match="token_bias"):
        Asked(token_bias={token: 1.0}).enter(sampler, 0, PROMPT, [])
    assert sampler.sample(logits_of(0), [0]).token_ids.item() == 8


def test_the_logits_are_not_changed() -> None:
    logits = logits_of(0, len(KINDS))
    before = logits.clone()
    sampler = Sampler(VOCAB, len(KINDS), CPU)
    for row, params in enumerate(KINDS):
        params.enter(sampler, row, PROMPT, [])
    sampler.sample(logits, list(range(len(KINDS))))
    assert torch.equal(logits, before)


# What is not computed


def operations(params: list[Asked]) -> list[str]:
    sampler = Sampler(VOCAB, len(params), CPU)
    for row, each in enumerate(params):
        each.enter(sampler, row, PROMPT, [])
    rows, logits = list(range(len(params))), logits_of(0, len(params))
    sampler.sample(logits, rows)  # the composition is made here
    with Operations() as seen:
        sampler.sample(logits, rows)
    return seen.names


def test_greedy_rows_cost_an_argmax_and_a_logprob() -> None:
    free = {"to", "view", "select", "unsqueeze", "squeeze"}  # nothing is read or written
    clean = ["nan_to_num", "clamp_"]
    choose = ["amax", "argmax", "index_select", "argmax", "mul", "add", "add"]
    names = [name for name in operations([Asked()] * 4) if name not in free]
    assert sorted(names) == sorted([*clean, *choose, "log_softmax", "gather"])


def test_plain_sampling_neither_sorts_nor_filters() -> None:
    names = operations([Asked(do_sample=True, temperature=0.7)] * 4)
    assert not {"sort", "topk", "scatter_add_", "where"} & set(names)


def test_nothing_sorts_the_vocabulary() -> None:
    assert "sort" not in operations(KINDS)


def test_nothing_waits_for_the_device_except_the_watermark() -> None:
    names = operations([params for params in KINDS if not params.watermark])
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "unique"} & set(names)


class CountedRows(list[int]):
    """How often somebody has looked through the rows."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return super().__iter__()


def test_whether_a_step_is_greedy_is_known_without_looking_at_rows_that_ask_for_nothing() -> None:
    sampler = Sampler(VOCAB, 512, CPU)
    for row in range(512):
        Asked().enter(sampler, row, PROMPT, [])
    rows = CountedRows(range(512))
    assert sampler.is_greedy(rows) and rows.num_passes == 0


def test_whether_a_step_is_greedy_takes_one_look_where_some_row_asks_for_something() -> None:
    sampler = Sampler(VOCAB, 512, CPU)
    EVERYTHING.enter(sampler, 511, PROMPT, [])
    rows = CountedRows(range(511))
    assert sampler.is_greedy(rows) and rows.num_passes == 1
    assert not sampler.is_greedy([*rows, 511])


@pytest.mark.parametrize("params", [kind for kind in KINDS if kind != Asked()])
def test_a_row_is_greedy_again_when_the_next_request_asks_for_nothing(params: Asked) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    params.enter(sampler, 0, PROMPT, [])
    assert not sampler.is_greedy([0])
    Asked().enter(sampler, 0, PROMPT, [])
    assert sampler.is_greedy([0])
