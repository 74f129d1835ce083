from __future__ import annotations

import pytest
import torch

from legato.kernels.attention import chunk
from legato.kernels.attention.chunk import ChunkConfig
from legato.kernels.paged_kv import Scoring, check_queries, ragged_attention_torch
from tests.kernels.paged_case import paged_case

QUERIES, CONTEXTS = [5, 1, 20], [5, 21, 37]
SMALL = ChunkConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)


def check_against_torch(case, assert_close, scoring=None, config=SMALL):
    scoring = scoring or Scoring(scale=case.q.shape[2] ** -0.5)
    actual = chunk._chunk_attention_triton(case.q, case.kv, case.cu_seqlens_q, scoring, config=config)
    assert_close(actual, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring))


def chunks(device, queries=QUERIES, contexts=CONTEXTS, *, heads=4, kv_heads=1, **shape):
    return paged_case(device, queries, contexts, heads=heads, kv_heads=kv_heads, **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_torch_in_every_dtype(device, assert_close, dtype):
    check_against_torch(chunks(device, dtype=dtype), assert_close)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1), (8, 1), (40, 1)])
def test_equals_torch_for_any_group(device, assert_close, heads, kv_heads):
    check_against_torch(chunks(device, heads=heads, kv_heads=kv_heads), assert_close)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_equals_torch_for_any_head_dim(device, assert_close, head_dim):
    check_against_torch(chunks(device, head_dim=head_dim), assert_close)


@pytest.mark.parametrize("block_size", [1, 16, 32, 256])
def test_equals_torch_for_any_block_size(device, assert_close, block_size):
    check_against_torch(chunks(device, block_size=block_size), assert_close)


def test_rows_select_from_persistent_tables(device, assert_close):
    check_against_torch(chunks(device, with_rows=True), assert_close)


def test_hundreds_of_sequences_find_their_tiles(device, assert_close):
    queries = [i % 3 for i in range(140)]
    check_against_torch(
        chunks(device, queries, [4 + i % 5 for i in range(140)], heads=1, kv_heads=1, head_dim=16), assert_close
    )


@pytest.mark.parametrize("window", [1, 7, 40, 1000])
def test_a_window_hides_older_keys(device, assert_close, window):
    check_against_torch(chunks(device), assert_close, Scoring(scale=0.125, window=window))


def test_alibi_and_soft_cap_bend_the_scores(device, assert_close):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    check_against_torch(chunks(device), assert_close, Scoring(1.0, slopes, soft_cap=5.0))


@pytest.mark.parametrize("window", [0, 7])
def test_sinks_take_their_share(device, assert_close, window):
    sinks = torch.tensor([3.0, -2.0, 0.5, 40.0], device=device)
    check_against_torch(chunks(device), assert_close, Scoring(0.125, window=window, sinks=sinks))


@pytest.mark.parametrize("rows", [4, 50, 4000])
def test_the_chosen_configs_equal_torch(device, assert_close, rows):
    check_against_torch(chunks(device), assert_close, config=chunk.chunk_config(rows, 1, 64))


def test_the_output_may_be_given(device):
    case = chunks(device)
    out = torch.empty(case.q.shape, device=device)
    assert chunk.chunk_attention(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125), out=out) is out


def test_a_sequence_without_a_context_and_what_is_behind_the_last_stay_as_they_are(device, assert_close):
    """So a captured step leaves room: for decodes before the chunks, and for chunks that are not there."""
    case = chunks(device, [3, 5, 1, 0], [0, 9, 21, 0], with_rows=True)
    q = torch.cat((case.q, case.q[:6]))
    scoring = Scoring(scale=0.125)
    for run in (chunk._chunk_attention_triton, chunk.ragged_attention_torch):
        out = torch.full_like(q, 7.0)
        run(q, case.kv, case.cu_seqlens_q, scoring, out)
        expected = ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring)
        assert_close(out[3:9], expected[3:9])
        assert (out[:3] == 7).all() and (out[9:] == 7).all()


def test_takes_a_part_of_the_sums(device, assert_close):
    case = paged_case(device, [3, 4, 5], [9, 4, 20])
    part = case.kv.sequences(1, 3)
    actual = chunk._chunk_attention_triton(case.q[3:], part, case.cu_seqlens_q[1:], Scoring(0.125))
    assert_close(actual, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125))[3:])


def test_queries_of_another_head_dim_are_refused(device):
    case = paged_case(device, [1], [5])
    with pytest.raises(AssertionError):
        check_queries(case.q[..., :32], case.kv)
