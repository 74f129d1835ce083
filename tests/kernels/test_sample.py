from __future__ import annotations

import pytest
import torch

from legato.kernels import sample as sampling
from legato.kernels.arrival import arrival_counters


def row_parameters(device, temperatures, seeds=None, positions=None):
    n = len(temperatures)
    return (
        torch.tensor(temperatures, device=device),
        torch.tensor(seeds or list(range(n)), device=device),
        torch.tensor(positions or [7] * n, dtype=torch.int32, device=device),
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """Small vocabularies that still need several programs and iterations."""
    monkeypatch.setattr(sampling, "BLOCK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 203])
def test_greedy_equals_torch(small_blocks, randn, assert_close, vocab_size, dtype):
    logits = randn(3, vocab_size, dtype=dtype)
    token_ids, logprobs = sampling._sample_triton(logits)
    expected_ids, expected_logprobs = sampling._sample_torch(logits)
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)


@pytest.mark.parametrize("num_programs", [1, 6])
def test_programs_that_take_several_blocks_equal_torch(small_blocks, randn, monkeypatch, assert_close, num_programs):
    monkeypatch.setattr(sampling, "NUM_PROGRAMS", num_programs)
    logits = randn(3, 150)
    token_ids, logprobs = sampling._sample_triton(logits)
    expected_ids, expected_logprobs = sampling._sample_torch(logits)
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)


def test_the_first_of_equal_logits_wins(small_blocks, device):
    logits = torch.zeros(1, 100, device=device)
    logits[0, [23, 57, 80]] = 1.0
    assert sampling._sample_triton(logits)[0].tolist() == [23]


def test_masked_logits_are_never_chosen_and_cost_no_nan(small_blocks, device, assert_close):
    logits = torch.full((2, 70), float("-inf"), device=device)
    logits[:, 50] = 3.0
    token_ids, logprobs = sampling._sample_triton(logits, *row_parameters(device, [0.0, 1.0]))
    assert token_ids.tolist() == [50, 50]
    assert_close(logprobs, torch.zeros(2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_without_any_logit_still_gives_a_token_of_the_vocabulary(small_blocks, device):
    for value in (float("-inf"), float("nan")):
        token_ids, _ = sampling._sample_triton(torch.full((1, 70), value, device=device))
        assert 0 <= token_ids.item() < 70


def test_rows_are_read_by_their_stride(small_blocks, randn):
    logits = randn(4, 60)[:, 10:43]
    assert torch.equal(sampling._sample_triton(logits)[0], logits.argmax(-1))


def test_sampled_and_greedy_rows_share_a_launch(small_blocks, randn, device, assert_close):
    logits = randn(6, 203)
    parameters = row_parameters(device, [0.0, 1.0, 0.5, 0.0, 2.0, 1.0], seeds=[1, 2, 3, 4, 2**40 + 5, -6])
    token_ids, logprobs = sampling._sample_triton(logits, *parameters)
    expected_ids, expected_logprobs = sampling._sample_torch(logits, *parameters)
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)
    assert torch.equal(token_ids[[0, 3]], logits[[0, 3]].argmax(-1))
    assert not arrival_counters(device).any()


def test_a_draw_depends_on_seed_and_position_and_nothing_else(device):
    logits = torch.zeros(1, 1000, device=device)

    def draw(seed, position):
        return sampling._sample_triton(logits, *row_parameters(device, [1.0], [seed], [position]))[0].item()

    assert draw(1, 1) == draw(1, 1)
    assert len({draw(1, 1), draw(1, 2), draw(2, 1), draw(1 + 2**32, 1)}) == 4
    beside_others = sampling._sample_triton(
        logits.expand(3, -1).contiguous(), *row_parameters(device, [0.5, 1.0, 0.0], [9, 1, 3], [4, 1, 1])
    )
    assert beside_others[0][1].item() == draw(1, 1)


def test_draws_follow_the_softmax():
    """Chi-square over 8 tokens, 20,000 draws; 24.3 is the 0.1 % point for 7 degrees of freedom."""
    num_draws, temperature = 20_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, 1.5])
    token_ids, _ = sampling._sample_torch(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), 1234),
        torch.arange(num_draws),
    )
    expected = (logits / temperature).softmax(-1) * num_draws
    observed = torch.bincount(token_ids, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum().item() < 24.3


def test_philox_gives_the_published_words():
    """Known answers of the Random123 suite for ten rounds."""
    zero = torch.zeros(1, dtype=torch.int64)
    ones = zero + 0xFFFFFFFF
    assert [w.item() for w in sampling._philox_torch(zero, [zero] * 4)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    assert [w.item() for w in sampling._philox_torch(zero - 1, [ones] * 4)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_the_public_functions_run_on_any_device(randn, device):
    logits = randn(2, 50)
    token_ids, logprobs = sampling.sample(logits, *row_parameters(device, [0.0, 0.0]))
    assert torch.equal(token_ids, sampling.greedy_sample(logits)[0])
    assert token_ids.dtype == torch.int64 and logprobs.dtype == torch.float32
