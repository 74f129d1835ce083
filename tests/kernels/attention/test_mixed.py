from __future__ import annotations

import pytest
import torch

from legato.kernels.attention.chunk import chunk_attention
from legato.kernels.attention.hopper import hopper_attention
from legato.kernels.attention.mixed import MixedLengths
from legato.kernels.attention.tiles import SplitPlan, split_plan
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import paged_case

LLAMA_8B = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "num_multiprocessors": 132}


@pytest.mark.parametrize(
    ("decodes", "context", "tokens", "before", "shares"),
    [
        (3, 33_000, 1024, 28_000, True),
        (32, 4_200, 1792, 2_048, True),
        (3, 33_000, 2048, 0, False),  # the decodes would be left over
        (1, 131_072, 1024, 28_000, False),
        (256, 300, 1500, 500, False),  # mostly beginnings and ends of tiles
    ],
)
def test_few_decodes_of_long_contexts_share_a_launch_with_prompts(decodes, context, tokens, before, shares):
    lengths = MixedLengths(decodes, decodes * context, context, tokens * (before + tokens // 2))
    assert lengths.share_a_launch(**LLAMA_8B) == shares


def test_tiles_that_start_first_are_not_split():
    plan = split_plan(35, 8, 132)
    assert plan.behind(3, 38) == SplitPlan(plan.num_tiles, plan.num_splits, 3)
    assert plan.behind(0, 35) == plan


QUERIES, CONTEXTS = [*[1] * 40, 130, 7], [*range(1, 2001, 50), 900, 3000]


def test_decodes_first_are_chunks_of_one_token_everywhere(device, assert_close):
    case = paged_case(device, [1, 1, 5], [9, 40, 21], with_rows=True)
    out = chunk_attention(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125), num_singles=2)
    assert_close(out, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125)))


@pytest.mark.parametrize("shape", [{}, {"heads": 2}, {"heads": 71, "kv_heads": 1}, {"head_dim": 64}, {"head_dim": 256}])
def test_equals_torch_with_decodes_first(assert_close, shape):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon has no interpreter: this kernel runs on Hopper GPUs only")
    hopper = torch.device("cuda")
    given = {"heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "head_dim": 128} | shape
    case = paged_case(hopper, QUERIES, CONTEXTS, **given)
    scoring = Scoring(case.q.shape[2] ** -0.5)
    out = torch.full_like(case.q, 7.0)
    hopper_attention(case.q, case.kv, case.cu_seqlens_q, scoring, out, num_singles=40)
    assert_close(out, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring))
