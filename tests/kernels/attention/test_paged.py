from __future__ import annotations

import pytest
import torch

from legato.kernels.attention.paged import PagedContext, paged_attention, paged_attention_reference
from legato.kernels.paged_kv import Scoring


def scattered(query_lens: list[int], context_lens: list[int], block_size: int, heads: int, kv_heads: int, dim: int):
    """Random sequences whose blocks are spread over the cache in random order."""
    needed = [-(-length // block_size) for length in context_lens]
    order = (torch.randperm(sum(needed) + 3) + 1).tolist()
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    k_cache, v_cache = torch.randn(2, sum(needed) + 4, block_size, kv_heads, dim)
    num_decodes = 0
    while num_decodes < len(query_lens) and query_lens[num_decodes] == 1 and context_lens[num_decodes] > 1:
        num_decodes += 1
    context = PagedContext(query_lens, context_lens, num_decodes, tables, block_size)
    q = torch.randn(sum(query_lens), heads, dim)
    k, v = torch.empty(2, sum(query_lens), kv_heads, dim)
    first = 0
    for i, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        slots = context._slots(slice(i, i + 1), torch.arange(context_len - query_len, context_len)[None])[0]
        k[first : first + query_len] = k_cache.flatten(0, 1)[slots]
        v[first : first + query_len] = v_cache.flatten(0, 1)[slots]
        first += query_len
    return q, k, v, k_cache, v_cache, context


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 6, 16), (9, 3, 64), (8, 1, 80)])
@pytest.mark.parametrize(
    "query_lens, context_lens",
    [
        ([1], [37]),
        ([1, 1, 1], [5, 200, 7]),
        ([5], [5]),
        ([4], [29]),
        ([1, 1, 3, 8, 1], [40, 41, 3, 33, 1]),
    ],
)
def test_cpu_path_equals_the_definition(
    block_size: int, heads: int, kv_heads: int, dim: int, query_lens: list[int], context_lens: list[int]
) -> None:
    torch.manual_seed(0)
    q, k, v, k_cache, v_cache, context = scattered(query_lens, context_lens, block_size, heads, kv_heads, dim)
    out = paged_attention(q, k, v, k_cache, v_cache, context, Scoring(dim**-0.5))
    expected = paged_attention_reference(q, k_cache, v_cache, context, Scoring(dim**-0.5))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


RAGGED = [([1, 1, 3, 8, 1], [40, 41, 3, 33, 1]), ([1, 1, 1], [5, 200, 7]), ([30], [30])]


@pytest.mark.parametrize("query_lens, context_lens", RAGGED)
@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_windows_soft_caps_and_alibi_equal_the_definition(
    query_lens: list[int], context_lens: list[int], window: int, soft_cap: float, alibi: bool
) -> None:
    torch.manual_seed(0)
    q, k, v, k_cache, v_cache, context = scattered(query_lens, context_lens, 16, 6, 2, 32)
    slopes = torch.rand(6) if alibi else None
    scoring = Scoring(0.4, slopes, window, soft_cap)
    out = paged_attention(q, k, v, k_cache, v_cache, context, scoring)
    expected = paged_attention_reference(q, k_cache, v_cache, context, scoring)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # A second layer that scores alike finds the biases ready, another one gets its own.
    assert torch.equal(paged_attention(q, k, v, k_cache, v_cache, context, scoring), out)
    other = Scoring(0.4, None, window + 3 if window else 3, soft_cap)
    expected = paged_attention_reference(q, k_cache, v_cache, context, other)
    torch.testing.assert_close(
        paged_attention(q, k, v, k_cache, v_cache, context, other), expected, rtol=1e-5, atol=1e-5
    )
