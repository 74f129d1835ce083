from __future__ import annotations

import pytest
import torch

from legato.kernels.attention.tiles import MIN_BLOCKS, SplitPlan, merge_parts, new_parts, split_plan
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import paged_case

BLOCK_M, BLOCK_N, HEAD_DIM, KV_HEADS, GROUP = 128, 16, 32, 2, 4
TOKENS = BLOCK_M // GROUP
SCALE = 0.2


@pytest.mark.parametrize(
    ("num_tiles", "expected"),
    [
        (35, SplitPlan(2, 8)),  # 280 programs: two waves, and 16 programs that become 128
        (41, SplitPlan(8, 2)),
        (3, SplitPlan(3, 5)),  # a short chunk behind a long context: 24 programs become 120
        (32, SplitPlan(0, 1)),  # 256 programs fill two waves
        (33, SplitPlan(0, 1)),
        (264, SplitPlan(0, 1)),  # sixteen waves
        (0, SplitPlan(0, 1)),
    ],
)
def test_the_last_wave_is_split_where_it_leaves_multiprocessors_idle(num_tiles, expected):
    assert split_plan(num_tiles, 8, 132) == expected


def test_a_plan_never_takes_longer_than_whole_tiles():
    for num_tiles in range(1, 300):
        for num_kv_heads in (1, 2, 8, 32):
            plan = split_plan(num_tiles, num_kv_heads, 132)
            assert plan.num_tiles <= num_tiles and (plan.num_tiles == 0) == (plan.num_splits == 1)
            whole = -(-num_tiles * num_kv_heads // 132)
            waves = -(-(num_tiles - plan.num_tiles) * num_kv_heads // 132)
            assert waves + -(-plan.num_parts * num_kv_heads // 132) / plan.num_splits <= whole


def parts_of(case, plan: SplitPlan, device: torch.device) -> torch.Tensor:
    """What an attention kernel leaves: for the tiles of one sequence that are split, the sums of every part."""
    parts = new_parts(plan, KV_HEADS, BLOCK_M, HEAD_DIM, device).fill_(float("nan"))
    context_len, num_queries = int(case.kv.context_lens[0]), case.q.shape[0]
    slots = (case.kv.block_tables[0].long()[:, None] * 16 + torch.arange(16, device=device)).flatten()[:context_len]
    keys, values = (cache.flatten(0, 1)[slots].float() for cache in (case.kv.k_cache, case.kv.v_cache))
    for tile in range(plan.num_tiles):
        first = tile * TOKENS
        last = min(first + TOKENS, num_queries) - 1
        num_blocks = (context_len - num_queries + last) // BLOCK_N + 1
        for split in range(plan.num_splits):
            begin, end = (num_blocks * i // plan.num_splits * BLOCK_N for i in (split, split + 1))
            for head in range(KV_HEADS):
                part = parts[(tile * plan.num_splits + split) * KV_HEADS + head].view(-1)
                for row in range((last - first + 1) * GROUP):
                    token, query_head = first + row // GROUP, head * GROUP + row % GROUP
                    seen = slice(begin, min(end, context_len - num_queries + token + 1))
                    scores = keys[seen, head] @ case.q[token, query_head].float() * SCALE * 1.4426950408889634
                    top = scores.max().clamp(min=-1e30) if len(scores) else torch.tensor(-1e30)
                    weights = torch.exp2(scores - top)
                    part[row * HEAD_DIM : (row + 1) * HEAD_DIM] = weights @ values[seen, head]
                    part[BLOCK_M * HEAD_DIM + row] = top
                    part[BLOCK_M * (HEAD_DIM + 1) + row] = weights.sum()
    return parts


@pytest.mark.parametrize("num_splits", [2, 3])
def test_merged_parts_are_the_attention_of_the_tile(device, assert_close, num_splits):
    plan = SplitPlan(2, num_splits)
    num_queries, context_len = TOKENS + 9, MIN_BLOCKS * num_splits * BLOCK_N + 70
    case = paged_case(
        device, [num_queries], [context_len], heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    out = torch.full(case.q.shape, 7.0, device=device)
    merge_parts(parts_of(case, plan, device), plan, case.kv, case.cu_seqlens_q, out, BLOCK_M, BLOCK_N)
    assert_close(out, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(SCALE)))


def test_tiles_with_short_contexts_are_left_alone(device):
    plan = SplitPlan(1, 8)
    case = paged_case(device, [20], [60], heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    parts = new_parts(plan, KV_HEADS, BLOCK_M, HEAD_DIM, device).fill_(float("nan"))
    out = torch.full(case.q.shape, 7.0, device=device)
    merge_parts(parts, plan, case.kv, case.cu_seqlens_q, out, BLOCK_M, BLOCK_N)
    assert (out == 7.0).all()
