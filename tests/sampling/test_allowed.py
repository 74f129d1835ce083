"""Only allowed tokens are chosen, whatever else a row asks for, and rows without a grammar notice nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from legato.sampling.allowed import Allowed, forbidden_by_shifting
from legato.sampling.sampler import Sampler
from tests.sampling.asked import Asked

CPU = torch.device("cpu")
VOCAB = 211
NAN, INF = float("nan"), float("inf")

WISHES = [
    Asked(),
    Asked(do_sample=True, seed=1, temperature=1e8),
    Asked(do_sample=True, seed=2, temperature=1e-8),
    Asked(do_sample=True, seed=3, top_k=50),
    Asked(do_sample=True, seed=4, top_p=0.5),
    Asked(do_sample=True, seed=5, typical_p=0.3),
    Asked(do_sample=True, seed=6, min_p=0.5),
    Asked(repetition_penalty=1e6),
    Asked(token_bias={3: 1e6}),
    Asked(watermark=True, do_sample=True, seed=7),
]


def pack(lines: list[list[int]], vocab_size: int = VOCAB) -> Tensor:
    """Token ids of each line -> bits."""
    flags = np.zeros((len(lines), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for line, ids in enumerate(lines):
        flags[line, ids] = 1
    return torch.from_numpy(np.packbits(flags, axis=1, bitorder="little").view(np.int32))


def make_sampler(requested: list[Asked]) -> Sampler:
    sampler = Sampler(VOCAB, len(requested), CPU)
    for row, params in enumerate(requested):
        params.enter(sampler, row, [1, 2], [])
    return sampler


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("wish", WISHES, ids=repr)
def test_no_wish_leads_to_a_token_that_is_not_allowed(wish: Asked) -> None:
    sampler = make_sampler([wish] * 3)
    lines = [[5], [0, 31, 32, 210], list(range(100, 140))]
    for seed in range(20):
        chosen = sampler.sample(logits(3, seed), [0, 1, 2], Allowed([0, 1, 2], pack(lines))).token_ids.tolist()
        assert all(token in line for token, line in zip(chosen, lines, strict=True))


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_broken_model_still_stays_within_what_is_allowed(broken: float, do_sample: bool) -> None:
    sampler = make_sampler([Asked(do_sample=do_sample, seed=3)])
    assert sampler.sample(torch.full((1, VOCAB), broken), [0], Allowed([0], pack([[77, 99]]))).token_ids.item() in (
        77,
        99,
    )


def test_rows_without_a_grammar_choose_as_if_nobody_had_one() -> None:
    requested = [
        Asked(),
        Asked(do_sample=True, seed=1),
        Asked(do_sample=True, seed=2, top_p=0.9),
    ]
    mixed, free = make_sampler(requested), make_sampler(requested)
    for seed in range(10):
        restricted = mixed.sample(logits(3, seed), [0, 1, 2], Allowed([1], pack([[9]]))).token_ids.tolist()
        unrestricted = free.sample(logits(3, seed), [0, 1, 2]).token_ids.tolist()
        assert restricted == [unrestricted[0], 9, unrestricted[2]]


def test_the_likeliest_of_the_allowed_tokens_is_the_greedy_choice() -> None:
    scores = logits(1)
    allowed = [4, 50, 64, 127, 128, 200]
    chosen = make_sampler([Asked()]).sample(scores, [0], Allowed([0], pack([allowed]))).token_ids.item()
    assert chosen == max(allowed, key=lambda token: float(scores[0, token]))


def test_reported_log_probabilities_are_those_of_the_model() -> None:
    sampled = make_sampler([Asked()]).sample(logits(1), [0], Allowed([0], pack([[8]])))
    assert torch.allclose(sampled.logprobs, logits(1).log_softmax(-1)[:, 8])


def test_more_bits_than_the_model_has_tokens_are_fine() -> None:
    bits = pack([[7, 300]], vocab_size=400)
    assert make_sampler([Asked()]).sample(logits(1), [0], Allowed([0], bits)).token_ids.item() == 7


def test_a_gpu_unpacks_the_same_bits() -> None:
    lines = [[5, 64, 31, 63], list(range(0, VOCAB, 3))]
    forbidden = torch.ones(2, VOCAB)
    for line, ids in enumerate(lines):
        forbidden[line, ids] = 0.0
    assert torch.equal(forbidden_by_shifting(pack(lines), VOCAB), forbidden)
