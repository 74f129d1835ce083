from __future__ import annotations

import pytest
import torch

from legato.kernels.attention import turned
from legato.kernels.attention.configs import DecodeConfig
from legato.kernels.paged_kv import PagedKV, Scoring
from tests.kernels.paged_case import PagedCase, paged_case

CONTEXTS = [1, 2, 70, 16, 65, 33]
WHOLE = DecodeConfig(extra_splits=1, min_split_len=1024, block_n=32, num_warps=4, num_stages=2)
SPLIT = DecodeConfig(extra_splits=12, min_split_len=16, block_n=16, num_warps=4, num_stages=2)
SCORING = Scoring(0.125)


def new_tokens(case: PagedCase) -> tuple[torch.Tensor, ...]:
    """Projections, positions, angles and slots of the last tokens, whose keys and values are not in the cache yet."""
    kv, lengths = case.kv, case.kv.context_lens.long()
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    generator = torch.Generator().manual_seed(7)
    width = (case.q.shape[1] + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(len(lengths), width, generator=generator).to(case.q.dtype).to(case.q.device)
    angles = torch.randn(int(lengths.max()), head_dim // 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(case.q.device)
    tables = kv.block_tables if kv.rows is None else kv.block_tables[kv.rows.long()]
    block_size, last = kv.k_cache.shape[1], lengths - 1
    slots = tables[torch.arange(len(lengths), device=last.device), last // block_size].long() * block_size
    slots += last % block_size
    for cache in (kv.k_cache, kv.v_cache):
        cache.flatten(0, 1)[slots] = float("nan")
    return qkv, last, table, slots


def check_against_torch(case, assert_close, config=SPLIT):
    qkv, positions, table, slots = new_tokens(case)
    copies = PagedKV(
        case.kv.k_cache.clone(), case.kv.v_cache.clone(), case.kv.block_tables, case.kv.context_lens, case.kv.rows
    )
    expected = turned._turned_torch(qkv.clone(), positions, table, copies, slots, SCORING)
    actual = turned._turned_triton(qkv, positions, table, case.kv, slots, SCORING, config)
    assert_close(actual, expected)
    for ours, theirs in ((case.kv.k_cache, copies.k_cache), (case.kv.v_cache, copies.v_cache)):
        assert_close(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


def decodes(device, contexts=CONTEXTS, *, heads=4, kv_heads=2, **shape):
    return paged_case(device, [1] * len(contexts), contexts, heads=heads, kv_heads=kv_heads, **shape)


@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_rotation_store_and_attention(device, assert_close, dtype, config):
    check_against_torch(decodes(device, dtype=dtype), assert_close, config)


@pytest.mark.parametrize("contexts", [[1], [16], [17], [300]])
def test_a_lone_sequence(device, assert_close, contexts):
    check_against_torch(decodes(device, contexts), assert_close)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (7, 1, 64), (4, 1, 128), (20, 1, 64)])
def test_equals_it_for_any_group(device, assert_close, heads, kv_heads, head_dim):
    check_against_torch(decodes(device, heads=heads, kv_heads=kv_heads, head_dim=head_dim), assert_close)


def test_rows_select_from_persistent_tables(device, assert_close):
    check_against_torch(decodes(device, with_rows=True), assert_close)


def test_a_negative_slot_is_not_stored(device):
    case = decodes(device, [20, 5])
    qkv, positions, table, slots = new_tokens(case)
    before = case.kv.k_cache.clone()
    turned._turned_triton(qkv, positions, table, case.kv, torch.full_like(slots, -1), SCORING, SPLIT)
    assert torch.equal(case.kv.k_cache.nan_to_num(9.0), before.nan_to_num(9.0))
