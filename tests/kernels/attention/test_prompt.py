from __future__ import annotations

import pytest
import torch

from legato.kernels.attention.prompt import LONG, OFTEN, REMEMBERED, RepeatedLengths, prompt_attention
from legato.kernels.paged_kv import PagedKV, Scoring, ragged_attention_torch


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [4, 4, 9, 1, 4]])
def test_equals_paged_attention_over_the_same_keys(randn, device, assert_close, lengths):
    total, heads, kv_heads, head_dim = sum(lengths), 6, 2, 32
    projection = randn(total, heads + 2 * kv_heads, head_dim)
    q, k, v = projection.split([heads, kv_heads, kv_heads], dim=1)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    # One token to a block, so that a sequence's table is a range.
    tables = (torch.arange(max(lengths)) + starts[:-1, None]).clamp(max=total - 1).to(torch.int32)
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    kv = PagedKV(k.contiguous()[:, None], v.contiguous()[:, None], tables.to(device), context_lens.to(device))
    expected = ragged_attention_torch(q, kv, starts, Scoring(0.2))
    assert_close(prompt_attention(q, k, v, lengths, 0.2), expected)


def test_lengths_that_do_not_add_up_are_refused(randn):
    with pytest.raises(AssertionError):
        prompt_attention(*randn(3, 4, 2, 8), [3], 1.0)


def test_long_prompts_are_familiar_once_they_have_come_often():
    repeated = RepeatedLengths()
    answers = [repeated.are_worth_a_plan([LONG, LONG]) for _ in range(OFTEN + 1)]
    assert answers == [False] * OFTEN + [True]
    assert not repeated.are_worth_a_plan([LONG])


def test_short_prompts_and_those_of_many_lengths_never_are():
    repeated = RepeatedLengths()
    for lengths in ([LONG - 1], [LONG, LONG + 1, LONG + 2]):
        assert not any(repeated.are_worth_a_plan(lengths) for _ in range(2 * OFTEN))


def test_lengths_that_do_not_come_again_are_forgotten():
    repeated = RepeatedLengths()
    for _ in range(OFTEN):
        repeated.are_worth_a_plan([LONG])
    for other in range(REMEMBERED):
        repeated.are_worth_a_plan([LONG + 1 + other])
    assert not repeated.are_worth_a_plan([LONG])


def test_the_priority_of_backends_is_never_set(monkeypatch, device, randn):
    """Once it is set, torch no longer prefers cuDNN on Hopper: what else the process computes would change."""

    def refuse(order: list[int]) -> None:
        raise AssertionError(f"priority set to {order}")

    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", refuse)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (randn(8, heads, 64, dtype=dtype) for heads in (4, 2, 2))
    prompt_attention(q, k, v, [4, 4], 0.125)
