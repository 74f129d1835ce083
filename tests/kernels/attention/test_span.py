from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from legato.kernels.attention import span
from legato.kernels.kv_format import gather
from tests.kernels.paged_case import PagedCase, paged_case

CONTEXTS = [1, 150, 16, 70]
BEGINS = [0, 3, 15, 64]


def reference(case: PagedCase, begins: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    """Token by token, in float64: softmax over the visible scores, times the values."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    size = case.kv.k_cache.shape[1]
    for i, (first, end) in enumerate(zip(begins, case.kv.context_lens.tolist(), strict=True)):
        if first == end:
            continue
        table = case.kv.block_tables[i if case.kv.rows is None else int(case.kv.rows[i])].cpu()
        slots = torch.tensor([int(table[p // size]) * size + p % size for p in range(first, end)])
        keys, values = (
            gather(cache.cpu().flatten(0, 1), slots, torch.float64) for cache in (case.kv.k_cache, case.kv.v_cache)
        )
        scores = torch.einsum("hd,khd->hk", case.q[i].cpu().double(), keys)
        if bias is not None:
            distances = [min(end - 1 - p, bias.shape[1] - 1) for p in range(first, end)]
            scores += bias.cpu().double()[:, distances]
        out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out


def spans(device, begins=BEGINS, contexts=CONTEXTS, **shape) -> tuple[PagedCase, torch.Tensor]:
    case = paged_case(device, [1] * len(contexts), contexts, **{"heads": 3, "kv_heads": 3, **shape})
    # T5's queries are scaled by its weights, not by the attention.
    return replace(case, q=case.q * 0.2), torch.tensor(begins, dtype=torch.int32, device=device)


def check(case, begins, bias, assert_close):
    expected = reference(case, begins.tolist(), bias)
    for run in (span._span_attention_triton, span._span_attention_torch):
        assert_close(run(case.q, case.kv, begins, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_sees_its_span_and_nothing_else(device, assert_close, dtype):
    check(*spans(device, dtype=dtype), None, assert_close)


@pytest.mark.parametrize("num_distances", [1, 20, 200])
def test_a_bias_goes_on_with_its_last_column(device, randn, assert_close, num_distances):
    check(*spans(device), randn(3, num_distances), assert_close)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
def test_heads_of_any_width(device, randn, assert_close, head_dim):
    check(*spans(device, head_dim=head_dim), randn(3, 33), assert_close)


def test_rows_select_from_persistent_tables(device, assert_close):
    check(*spans(device, with_rows=True), None, assert_close)


def test_an_empty_span_gives_zeros(device, randn, assert_close):
    case, begins = spans(device, begins=[1, 150, 10, 70])
    check(case, begins, randn(3, 5), assert_close)
    nobody = torch.zeros_like(case.kv.context_lens)
    for run in (span._span_attention_triton, span._span_attention_torch):
        assert not run(case.q, replace(case.kv, context_lens=nobody), None, None).any()


def test_without_begins_spans_start_at_the_first_slot(device, assert_close):
    case, begins = spans(device, begins=[0] * len(CONTEXTS))
    for run in (span._span_attention_triton, span._span_attention_torch):
        assert_close(run(case.q, case.kv, None, None), reference(case, begins.tolist(), None))


def test_an_8_bit_cache_is_read_as_numbers(device, assert_close):
    check(*spans(device, cache_dtype=torch.float8_e5m2), None, assert_close)


def test_queries_may_be_a_part_of_a_wider_product(device, assert_close):
    case, begins = spans(device)
    wide = torch.cat((case.q, case.q), dim=1)
    for run in (span._span_attention_triton, span._span_attention_torch):
        assert_close(run(wide[:, :3], case.kv, begins, None), reference(case, begins.tolist(), None))
