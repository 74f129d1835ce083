"""What is left for the KV cache: the arithmetic of warm-up, and what it refuses."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.layers.kv_cache import KVCache, KVShape
from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.server.memory.allocator import release_blocks
from legato.server.memory.budget import (
    OutOfMemory,
    Reading,
    cache_budget,
    graph_bytes,
    is_out_of_memory,
    largest_step,
    refused_for_memory,
)
from legato.server.memory.capacity import GIB, LAYER_GRAPH_BYTES, RESERVED_BLOCKS, RequestedLimits

CPU = torch.device("cpu")
# 80 GiB, of which others have 2, the weights 16 and the largest step 3 more.
READING = Reading(total=80 * GIB, free=62 * GIB, reserved=16 * GIB, peak=19 * GIB)
RESERVE = 80 * GIB // 100


def requested(
    block_size: int = 16, bytes_per_token: int = 1024, max_positions: int = 4096, **request: int
) -> RequestedLimits:
    return RequestedLimits(pb.WarmupRequest(**request), max_positions, block_size, bytes_per_token)


def test_the_cache_gets_what_others_weights_step_graphs_and_reserve_leave() -> None:
    assert READING.others == 2 * GIB
    assert cache_budget(READING, 1.0, graphs=GIB) == 80 * GIB - (2 + 19 + 1) * GIB - RESERVE


def test_a_fraction_bounds_what_is_ours_and_not_what_others_have() -> None:
    assert cache_budget(READING, 0.5) == 40 * GIB - 19 * GIB - RESERVE


def test_a_fraction_gives_no_memory_that_is_not_there() -> None:
    crowded = Reading(total=80 * GIB, free=10 * GIB, reserved=16 * GIB, peak=19 * GIB)
    assert cache_budget(crowded, 0.9) == 26 * GIB - 19 * GIB - RESERVE


def test_a_small_device_keeps_a_reserve_that_is_worth_having() -> None:
    assert cache_budget(Reading(8 * GIB, 8 * GIB, 0, 0), 1.0) == 8 * GIB - 256 * 2**20


def test_graphs_take_their_results_their_nodes_and_one_working_space() -> None:
    taken = graph_bytes([1, 2, 8], 8, 5, row_bytes=100, step_tokens=16, step_bytes=1600)
    assert taken == 11 * 100 + 3 * 5 * LAYER_GRAPH_BYTES + 800


def test_no_graphs_take_nothing() -> None:
    assert graph_bytes([], 8, 5, row_bytes=100, step_tokens=16, step_bytes=1600) == 0


@given(st.integers(1, 300), st.integers(2, 5000), st.integers(1, 20_000))
def test_the_largest_step_has_all_rows_and_as_many_tokens_as_may_be(rows: int, longest: int, tokens: int) -> None:
    counts = largest_step(rows, longest, tokens)
    assert len(counts) == rows and min(counts) >= 1 and max(counts) <= longest
    assert sum(counts) == min(max(rows, tokens), rows * longest)


# ---- limits that are asked for, and memory ---------------------------------------------------------------------------


def test_without_limits_memory_decides() -> None:
    found = requested(max_rows=64).fit(16 * 1024 * 100)
    assert (found.num_blocks, found.max_total_tokens, found.max_input_tokens) == (100 + RESERVED_BLOCKS, 1600, 1599)


def test_no_more_blocks_than_all_rows_can_use() -> None:
    assert requested(max_rows=2).fit(100 * GIB).num_blocks == 2 * 4096 // 16 + RESERVED_BLOCKS


def test_a_limit_of_the_whole_cache_is_a_bound() -> None:
    assert requested(max_batch_total_tokens=5000).fit(100 * GIB).num_blocks == -(-5000 // 16) + RESERVED_BLOCKS


def test_half_the_bytes_per_token_are_twice_the_blocks() -> None:
    sixteen, eight = (requested(bytes_per_token=size).fit(16 * 1024 * 100) for size in (1024, 512))
    assert eight.num_blocks - RESERVED_BLOCKS == 2 * (sixteen.num_blocks - RESERVED_BLOCKS)


@pytest.mark.parametrize(
    ("request_fields", "budget", "words"),
    [
        ({"max_total_tokens": 4096}, 1024 * 1024, ["max_total_tokens=4096", "1024 tokens", "--max-batch-prefill"]),
        (
            {"max_total_tokens": 4096, "max_batch_total_tokens": 64},
            GIB,
            ["64 tokens", "--max-batch-total-tokens"],
        ),
        (
            {"max_rows": 7, "max_prefill_tokens": 99},
            -GIB,
            ["99 tokens in 7 rows", "0.00 GiB"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers_and_a_cure(
    request_fields: dict[str, int], budget: int, words: list[str]
) -> None:
    with pytest.raises(RequestRefused) as refused:
        requested(**request_fields).fit(budget)
    assert all(word in str(refused.value) for word in words), str(refused.value)


# ---- running out ----------------------------------------------------------------------------------------------------


def cpu_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_the_error_of_the_cpu_allocator_is_known() -> None:
    assert is_out_of_memory(cpu_error())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
)
def test_running_out_of_memory_becomes_a_typed_error(error: BaseException) -> None:
    with pytest.raises(OutOfMemory, match="Out of memory: no room"), refused_for_memory("no room", CPU):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), refused_for_memory("no room", CPU):
        raise RuntimeError("shapes differ")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back on Linux only")
def test_blocks_that_are_given_back_take_no_memory_and_the_others_keep_what_they_hold() -> None:
    cache = KVCache(KVShape(2, 4, 64, torch.float32), num_blocks=1025, block_size=16, device=CPU)
    for layer in cache.layers:
        layer.keys.fill_(1.0)
        layer.values.fill_(2.0)
    before, total = resident_bytes(), 4 * cache.layers[0].keys.nbytes
    release_blocks(cache, [*range(1, 500), *range(501, 1025)])
    assert before - resident_bytes() > 0.9 * total
    for layer in cache.layers:
        assert (layer.keys[[0, 500]] == 1.0).all() and (layer.values[[0, 500]] == 2.0).all()
        layer.keys[7] = 3.0  # they may be written again
        assert (layer.keys[7] == 3.0).all()
