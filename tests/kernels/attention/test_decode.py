from __future__ import annotations

import pytest
import torch

from legato.kernels.arrival import arrival_counters
from legato.kernels.attention import decode
from legato.kernels.attention.configs import DecodeConfig
from legato.kernels.paged_kv import Scoring
from tests.kernels.paged_case import paged_case

CONTEXTS = [1, 70, 16]
ONE = DecodeConfig(extra_splits=0, min_split_len=32, block_n=32, num_warps=4, num_stages=2)
SPLIT = DecodeConfig(extra_splits=6, min_split_len=16, block_n=16, num_warps=4, num_stages=2)


def check_against_torch(case, assert_close, scoring=None, config=SPLIT):
    scoring = scoring or Scoring(scale=case.q.shape[2] ** -0.5)
    actual = decode._decode_attention_triton(case.q, case.kv, scoring, config=config)
    assert_close(actual, decode._decode_attention_torch(case.q, case.kv, scoring))


def decodes(device, contexts=CONTEXTS, *, heads=4, kv_heads=1, **shape):
    return paged_case(device, [1] * len(contexts), contexts, heads=heads, kv_heads=kv_heads, **shape)


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_torch_in_every_dtype(device, assert_close, dtype, config):
    check_against_torch(decodes(device, dtype=dtype), assert_close, config=config)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1), (8, 1), (20, 1)])
def test_equals_torch_for_any_group(device, assert_close, heads, kv_heads):
    check_against_torch(decodes(device, heads=heads, kv_heads=kv_heads), assert_close)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_equals_torch_for_any_head_dim(device, assert_close, head_dim):
    check_against_torch(decodes(device, head_dim=head_dim), assert_close)


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
def test_equals_torch_for_any_block_size(device, assert_close, block_size):
    check_against_torch(decodes(device, block_size=block_size), assert_close)


def test_rows_select_from_persistent_tables(device, assert_close):
    check_against_torch(decodes(device, with_rows=True), assert_close)


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_take_their_share_once(device, assert_close, window, config):
    sinks = torch.tensor([3.0, -2.0, 0.5, 40.0], device=device)
    check_against_torch(decodes(device), assert_close, Scoring(0.125, window=window, sinks=sinks), config)


@pytest.mark.parametrize("extra_splits", [1, 3, 50])
def test_lengths_share_the_splits(device, assert_close, extra_splits):
    """Whoever is long, and wherever it stands."""
    config = DecodeConfig(extra_splits, min_split_len=16, block_n=16, num_warps=4, num_stages=2)
    for contexts in ([500, 1, 0, 33], [3, 700], [0, 0, 16, 17, 400]):
        check_against_torch(decodes(device, contexts), assert_close, config=config)


def test_hundreds_of_sequences_find_their_splits(device, assert_close):
    contexts = [i % 40 for i in range(139)] + [300]
    check_against_torch(decodes(device, contexts, heads=1, head_dim=16), assert_close)


def test_more_parts_than_are_merged_at_once(device, assert_close):
    config = DecodeConfig(extra_splits=50, min_split_len=16, block_n=16, num_warps=4, num_stages=2)
    check_against_torch(decodes(device, [300, 515], heads=16, kv_heads=1, head_dim=128), assert_close, config=config)


def test_an_empty_context_gives_zeros(device):
    case = decodes(device, [0, 40])
    out = torch.full(case.q.shape, float("nan"), device=device)
    decode._decode_attention_triton(case.q, case.kv, Scoring(0.125), out, SPLIT)
    assert (out[0] == 0).all() and out[1].isfinite().all()


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_a_window_hides_older_keys(device, assert_close, window):
    check_against_torch(decodes(device), assert_close, Scoring(scale=0.125, window=window))


def test_alibi_and_soft_cap_bend_the_scores(device, assert_close):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    check_against_torch(decodes(device), assert_close, Scoring(1.0, slopes, soft_cap=5.0))
    check_against_torch(decodes(device), assert_close, Scoring(1.0, soft_cap=2.0))


def test_counters_are_zero_again_after_every_launch(device, assert_close):
    for _ in range(2):
        check_against_torch(decodes(device), assert_close)
    assert not arrival_counters(device).any()


def test_the_output_may_be_given(device):
    case = decodes(device)
    out = torch.empty(case.q.shape, device=device)
    assert decode.decode_attention(case.q, case.kv, Scoring(0.125), out=out) is out


@pytest.mark.parametrize("sequences", [1, 8, 32, 256])
def test_every_configured_split_is_whole_blocks(sequences):
    config = decode.decode_config(sequences, 8)
    assert config.min_split_len % config.block_n == 0
