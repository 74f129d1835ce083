"""On a GPU: the tokens of the CPU, and no waiting."""

from __future__ import annotations

import pytest
import torch

from legato.sampling.sampler import Sampler
from tests.sampling.asked import Asked
from tests.sampling.test_sampler import KINDS, PROMPT, VOCAB, logits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = list(range(len(KINDS)))


def sampler_on(device: str, kinds: list[Asked]) -> Sampler:
    sampler = Sampler(VOCAB, len(kinds), torch.device(device))
    for row, params in enumerate(kinds):
        params.enter(sampler, row, PROMPT, [])
    return sampler


def test_tokens_are_those_of_the_cpu() -> None:
    here, there = sampler_on("cpu", KINDS), sampler_on("cuda", KINDS)
    for step in range(30):
        logits = logits_of(step, len(KINDS))
        ours, theirs = here.sample(logits, ROWS), there.sample(logits.cuda(), ROWS)
        assert theirs.token_ids.tolist() == ours.token_ids.tolist()
        torch.testing.assert_close(theirs.logprobs.cpu(), ours.logprobs)


def test_a_step_does_not_wait_for_the_device() -> None:
    kinds = [params for params in KINDS if not params.watermark]
    sampler, rows = sampler_on("cuda", kinds), list(range(len(kinds)))
    logits = logits_of(0, len(kinds)).cuda()
    sampler.sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row, params in enumerate(kinds):
            params.enter(sampler, row, PROMPT, [4])
        sampler.sample(logits, rows)
        sampler.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
