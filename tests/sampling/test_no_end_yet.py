"""No end before a minimum of tokens: the end tokens are out of the question until then, and only then."""

from __future__ import annotations

import pytest
import torch

from legato.sampling.sampler import Sampler
from tests.sampling.asked import Asked

CPU = torch.device("cpu")
VOCAB = 50
END = 7
# Would end at once: nothing else is nearly as likely.
LOGITS = torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([END]), 60.0)
KINDS = [
    Asked(min_new_tokens=3, end_token_ids=(END,)),
    Asked(min_new_tokens=3, end_token_ids=(END, 0), do_sample=True, temperature=0.5, seed=1),
    Asked(min_new_tokens=3, end_token_ids=(END,), do_sample=True, top_p=0.5, top_k=3, min_p=0.1, seed=2),
    Asked(min_new_tokens=3, end_token_ids=(END,), token_bias={END: 100.0}, repetition_penalty=2.0),
]


def generate(sampler: Sampler, row: int, num: int) -> list[int]:
    return [int(sampler.sample(LOGITS, [row]).token_ids) for _ in range(num)]


@pytest.mark.parametrize("params", KINDS)
def test_the_end_comes_as_soon_as_it_may(params: Asked) -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    params.enter(sampler, 1, [3], [])
    tokens = generate(sampler, 1, 4)
    assert not set(tokens[:3]) & set(params.end_token_ids)
    assert tokens[3] == END


@pytest.mark.parametrize("generated", [1, 2, 3, 5])
def test_a_preempted_request_does_not_start_counting_again(generated: int) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    KINDS[0].enter(sampler, 0, [3], [4] * generated)
    left = max(3 - generated, 0)
    tokens = generate(sampler, 0, left + 1)
    assert END not in tokens[:left] and tokens[left] == END


def test_other_rows_of_the_batch_may_end() -> None:
    sampler = Sampler(VOCAB, 3, CPU)
    Asked().enter(sampler, 0, [3], [])
    KINDS[0].enter(sampler, 1, [3], [])
    Asked(do_sample=True).enter(sampler, 2, [3], [])
    tokens = sampler.sample(LOGITS.expand(3, -1), [2, 1, 0]).token_ids.tolist()
    assert tokens[0] == tokens[2] == END != tokens[1]


def test_the_row_is_plain_again_afterwards() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    KINDS[0].enter(sampler, 0, [3], [])
    assert not sampler.is_greedy([0])
    generate(sampler, 0, 3)
    assert sampler.is_greedy([0])


def test_the_row_forgets_it_with_its_request() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    KINDS[0].enter(sampler, 0, [3], [])
    Asked().enter(sampler, 0, [3], [])
    assert generate(sampler, 0, 1) == [END]


@pytest.mark.parametrize("token", [VOCAB, 2**32 - 1])
def test_an_end_that_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="end_token_ids"):
        Asked(min_new_tokens=1, end_token_ids=(token,)).enter(Sampler(VOCAB, 1, CPU), 0, [3], [])


def test_a_row_is_greedy_once_it_may_end() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    KINDS[0].enter(sampler, 0, [3], [])
    for _ in range(3):
        assert not sampler.is_greedy([0])
        sampler.sample(LOGITS, [0])
    assert sampler.is_greedy([0])
