"""No end before a minimum of tokens: the end tokens are out of the question until then, and only then."""

from __future__ import annotations

import pytest
import torch

from legato.pb import generate_pb2
from legato.sampling.params import SamplingParams
from legato.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 50
END = 7
# Would end at once: nothing else is nearly as likely.
LOGITS = torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([END]), 60.0)
KINDS = [
    SamplingParams(min_new_tokens=3, end_token_ids=(END,)),
    SamplingParams(min_new_tokens=3, end_token_ids=(END, 0), do_sample=True, temperature=0.5, seed=1),
    SamplingParams(min_new_tokens=3, end_token_ids=(END,), do_sample=True, top_p=0.5, top_k=3, min_p=0.1, seed=2),
    SamplingParams(min_new_tokens=3, end_token_ids=(END,), token_bias={END: 100.0}, repetition_penalty=2.0),
]


def generate(sampler: Sampler, row: int, num: int) -> list[int]:
    return [int(sampler.sample(LOGITS, [row]).token_ids) for _ in range(num)]


@pytest.mark.parametrize("params", KINDS)
def test_the_end_comes_as_soon_as_it_may(params: SamplingParams) -> None:
    sampler = Sampler(VOCAB, 2, CPU)
    sampler.set_row(1, params, [3], [])
    tokens = generate(sampler, 1, 4)
    assert not set(tokens[:3]) & set(params.end_token_ids)
    assert tokens[3] == END


@pytest.mark.parametrize("generated", [1, 2, 3, 5])
def test_a_preempted_request_does_not_start_counting_again(generated: int) -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    sampler.set_row(0, KINDS[0], [3], [4] * generated)
    left = max(3 - generated, 0)
    tokens = generate(sampler, 0, left + 1)
    assert END not in tokens[:left] and tokens[left] == END


def test_other_rows_of_the_batch_may_end() -> None:
    sampler = Sampler(VOCAB, 3, CPU)
    sampler.set_row(0, SamplingParams(), [3], [])
    sampler.set_row(1, KINDS[0], [3], [])
    sampler.set_row(2, SamplingParams(do_sample=True), [3], [])
    tokens = sampler.sample(LOGITS.expand(3, -1), [2, 1, 0]).token_ids.tolist()
    assert tokens[0] == tokens[2] == END != tokens[1]


def test_the_row_is_plain_again_afterwards() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    sampler.set_row(0, KINDS[0], [3], [])
    assert not sampler.is_greedy([0])
    generate(sampler, 0, 3)
    assert sampler.is_greedy([0])


def test_the_row_forgets_it_with_its_request() -> None:
    sampler = Sampler(VOCAB, 1, CPU)
    sampler.set_row(0, KINDS[0], [3], [])
    sampler.set_row(0, SamplingParams(), [3], [])
    assert generate(sampler, 0, 1) == [END]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_an_end_that_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="end_token_ids"):
        Sampler(VOCAB, 1, CPU).set_row(0, SamplingParams(min_new_tokens=1, end_token_ids=(token,)), [3], [])


def test_the_message_carries_it() -> None:
    pb = generate_pb2.NextTokenChooserParameters(min_new_tokens=3, end_token_ids=[END])
    assert SamplingParams.from_pb(pb) == KINDS[0]
