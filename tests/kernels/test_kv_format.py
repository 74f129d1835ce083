"""An 8-bit KV cache: what is stored, and that attention reads it as what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from legato.kernels import rotary
from legato.kernels.attention import chunk, decode
from legato.kernels.attention.chunk import ChunkConfig
from legato.kernels.attention.configs import DecodeConfig
from legato.kernels.attention.paged import PagedContext, paged_attention, paged_attention_reference
from legato.kernels.kv_format import EIGHT_BITS, KVScales, gather, largest, store
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import paged_case

SPLIT = DecodeConfig(extra_splits=6, min_split_len=16, block_n=16, num_warps=4, num_stages=2)
SMALL = ChunkConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
formats = pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=["e4m3", "e5m2"])
scaled = pytest.mark.parametrize("scales", [None, KVScales(3.0, 0.007)], ids=["plain", "scaled"])
types = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@formats
def test_what_is_too_large_becomes_the_largest_number(cache_dtype):
    cache = torch.zeros(4, 1, 3, dtype=cache_dtype)
    store(cache, torch.tensor([2]), torch.tensor([[[1e6, -float("inf"), 1.5]]]))
    most = largest(cache_dtype)
    assert gather(cache, torch.tensor([2]), torch.float32).flatten().tolist() == [most, -most, 1.5]


@formats
def test_a_broken_number_stays_broken(cache_dtype):
    cache = torch.zeros(1, 1, 1, dtype=cache_dtype)
    store(cache, torch.tensor([0]), torch.full((1, 1, 1), float("nan")))
    assert cache.float().isnan().all()


@formats
def test_other_slots_are_left_alone(cache_dtype):
    cache = torch.full((3, 1, 2), 0.5, dtype=cache_dtype)
    store(cache, torch.tensor([1]), torch.ones(1, 1, 2))
    assert cache.float().flatten().tolist() == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5]


@formats
def test_what_is_too_large_fits_divided_by_its_scale(cache_dtype):
    cache = torch.zeros(2, 1, 2, dtype=cache_dtype)
    store(cache, torch.tensor([1]), torch.tensor([[[1e6, -6e5]]]), scale=1e5)
    torch.testing.assert_close(gather(cache, torch.tensor([1]), torch.float32)[0, 0], torch.tensor([10.0, -6.0]))


@scaled
@formats
@types
def test_the_kernel_stores_the_same_bytes_as_torch(randn, device, cache_dtype, dtype, scales):
    qkv = randn(5, (4 + 2 * 2) * 64, dtype=dtype) * 300  # e4m3 ends at 448
    positions, slots = torch.arange(5, device=device), torch.tensor([3, 17, 4, 30, 0], device=device)
    caches = [torch.zeros(2, 16, 2, 64, dtype=cache_dtype, device=device) for _ in range(4)]
    # Angles of 0: the two versions must round the same numbers.
    table = torch.cat((torch.ones(8, 32), torch.zeros(8, 32)), dim=-1).to(device)
    rotary._rotary_and_store_torch(qkv.clone(), positions, table, *caches[:2], slots, scales)
    rotary._rotary_and_store_triton(qkv.clone(), positions, table, *caches[2:], slots, scales)
    for expected, actual in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert caches[2].float().abs().max() <= largest(cache_dtype)


@scaled
@formats
@types
def test_decode_attention_equals_torch(device, assert_close, cache_dtype, dtype, scales):
    case = paged_case(device, [1] * 3, [1, 70, 16], kv_heads=1, dtype=dtype, cache_dtype=cache_dtype)
    kv = replace(case.kv, scales=scales)
    actual = decode._decode_attention_triton(case.q, kv, Scoring(0.125), config=SPLIT)
    assert_close(actual, decode._decode_attention_torch(case.q, kv, Scoring(0.125)))


@scaled
@formats
@types
def test_chunk_attention_equals_torch(device, assert_close, cache_dtype, dtype, scales):
    case = paged_case(device, [5, 1, 20], [5, 21, 37], kv_heads=1, dtype=dtype, cache_dtype=cache_dtype)
    kv = replace(case.kv, scales=scales)
    actual = chunk._chunk_attention_triton(case.q, kv, case.cu_seqlens_q, Scoring(0.125), config=SMALL)
    assert_close(actual, ragged_attention_torch(case.q, kv, case.cu_seqlens_q, Scoring(0.125)))


@formats
def test_scales_multiply_what_is_read(device, assert_close, cache_dtype):
    """Of a cache of float32 with the same keys and values."""
    case, scales = paged_case(device, [5, 1], [9, 21], cache_dtype=cache_dtype), KVScales(3.0, 0.007)
    wide = replace(case.kv, k_cache=case.kv.k_cache.float() * 3.0, v_cache=case.kv.v_cache.float() * 0.007)
    for scoring in (Scoring(0.125), Scoring(0.125, window=4), Scoring(0.125, soft_cap=2.0)):
        expected = ragged_attention_torch(case.q, wide, case.cu_seqlens_q, scoring)
        actual = ragged_attention_torch(case.q, replace(case.kv, scales=scales), case.cu_seqlens_q, scoring)
        assert_close(actual, expected)


@scaled
@formats
def test_attention_on_a_cpu_equals_its_definition(assert_close, cache_dtype, scales):
    queries, contexts = [1, 1, 4], [9, 30, 22]
    case = paged_case(torch.device("cpu"), queries, contexts, cache_dtype=cache_dtype)
    context = PagedContext(queries, contexts, 2, case.kv.block_tables, 16)
    unused = case.q[:, :2]  # the step's own keys: a chunk with a cached beginning reads the cache
    caches = case.kv.k_cache, case.kv.v_cache
    actual = paged_attention(case.q, unused, unused, *caches, context, Scoring(0.125), scales)
    assert_close(actual, paged_attention_reference(case.q, *caches, context, Scoring(0.125), scales))
