from __future__ import annotations

import pytest
import torch

from legato.kernels import sample as sampling
from legato.kernels.arrival import arrival_counters


@pytest.fixture
def small_blocks(monkeypatch):
    """Small vocabularies that still need several programs and iterations."""
    monkeypatch.setattr(sampling, "BLOCK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 203])
def test_greedy_equals_torch(small_blocks, randn, assert_close, vocab_size, dtype):
    logits = randn(3, vocab_size, dtype=dtype)
    token_ids, logprobs = sampling._greedy_triton(logits)
    expected_ids, expected_logprobs = sampling._greedy_torch(logits)
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)


@pytest.mark.parametrize("num_programs", [1, 6])
def test_programs_that_take_several_blocks_equal_torch(small_blocks, randn, monkeypatch, assert_close, num_programs):
    monkeypatch.setattr(sampling, "NUM_PROGRAMS", num_programs)
    logits = randn(3, 150)
    token_ids, logprobs = sampling._greedy_triton(logits)
    expected_ids, expected_logprobs = sampling._greedy_torch(logits)
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)


def test_the_first_of_equal_logits_wins(small_blocks, device):
    logits = torch.zeros(1, 100, device=device)
    logits[0, [23, 57, 80]] = 1.0
    assert sampling._greedy_triton(logits)[0].tolist() == [23]


def test_masked_logits_are_never_chosen_and_cost_no_nan(small_blocks, device, assert_close):
    logits = torch.full((2, 70), float("-inf"), device=device)
    logits[:, 50] = 3.0
    token_ids, logprobs = sampling._greedy_triton(logits)
    assert token_ids.tolist() == [50, 50]
    assert_close(logprobs, torch.zeros(2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_without_any_logit_still_gives_a_token_of_the_vocabulary(small_blocks, device):
    for value in (float("-inf"), float("nan")):
        token_ids, _ = sampling._greedy_triton(torch.full((1, 70), value, device=device))
        assert 0 <= token_ids.item() < 70


def test_rows_are_read_by_their_stride(small_blocks, randn):
    logits = randn(4, 60)[:, 10:43]
    assert torch.equal(sampling._greedy_triton(logits)[0], logits.argmax(-1))


def test_the_counters_are_left_at_zero(small_blocks, randn, device):
    sampling._greedy_triton(randn(6, 203))
    assert not arrival_counters(device).any()


def test_the_public_function_runs_on_any_device(randn):
    logits = randn(2, 50)
    token_ids, logprobs = sampling.greedy_sample(logits)
    assert torch.equal(token_ids, logits.argmax(-1))
    assert token_ids.dtype == torch.int64 and logprobs.dtype == torch.float32
