from __future__ import annotations

import pytest

from legato.kernels import paged_attention_triton as paged
from legato.kernels import paged_kv
from legato.kernels.chunk_attention import _chunk_attention_triton
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import paged_case


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("num_decodes", [0, 2, 3])
def test_decodes_and_chunks_of_one_step_meet_in_one_output(device, assert_close, num_decodes, with_rows):
    queries, contexts = [1, 1, 1, 6, 9], [20, 3, 1, 6, 30]
    if num_decodes == 0:
        queries[0] = 4
    case = paged_case(device, queries, contexts, with_rows=with_rows)
    scoring = Scoring(0.125)
    actual = paged.paged_attention_triton(case.q, case.kv, case.cu_seqlens_q, num_decodes, scoring)
    assert_close(actual, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring))


def test_a_step_of_decodes_only_needs_no_chunk(device, assert_close):
    case = paged_case(device, [1, 1], [20, 3])
    actual = paged.paged_attention_triton(case.q, case.kv, case.cu_seqlens_q, 2, Scoring(0.125))
    assert_close(actual, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125)))


def test_the_chunk_kernel_takes_a_part_of_the_sums(device, assert_close):
    case = paged_case(device, [3, 4, 5], [9, 4, 20])
    part = case.kv.sequences(1, 3)
    actual = _chunk_attention_triton(case.q[3:], part, case.cu_seqlens_q[1:], Scoring(0.125))
    assert_close(actual, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125))[3:])


def test_queries_of_another_head_dim_are_refused(device):
    case = paged_case(device, [1], [5])
    with pytest.raises(AssertionError):
        paged_kv.check_queries(case.q[..., :32], case.kv)
