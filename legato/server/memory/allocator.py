"""Memory of the host, for computing on a CPU: what a shard keeps for its next step, and what it gives back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence

import torch

from legato.layers.kv_cache import KVCache

# Parameters of mallopt, from malloc.h, and the largest threshold that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
MADV_DONTNEED, MADV_NOHUGEPAGE = 4, 15  # of madvise


def return_freed_memory() -> None:
    """Give what is free in the heap back to the system, once: while nothing is computed nobody needs it."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed for the next step.

    By default every buffer of a few megabytes is returned to the system and its pages are faulted in again a step
    later: for sampling 16 rows with top_p that is 12 ms instead of 3.5. And to have one heap for all threads: only the
    first one gets the huge pages that the launcher asks for (`launcher/plan.py`), and the weights are another thread's.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def use_small_pages(cache: KVCache) -> None:
    """Have the KV cache take memory 4 KB at a time. A block is some kilobytes in each of two tensors per layer: huge
    pages, which are for weights, would round every one of these tensors up to 2 MB."""
    _advise(cache, [(0, cache.num_blocks)], MADV_NOHUGEPAGE)


def release_blocks(cache: KVCache, blocks: Sequence[int]) -> None:
    """Give back the pages of these blocks, which are sorted. Their keys and values are undefined from then on."""
    _advise(cache, list(_runs(blocks)), MADV_DONTNEED)


def _advise(cache: KVCache, runs: Sequence[tuple[int, int]], advice: int) -> None:
    """Where the system refuses, memory is merely kept."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in cache.tensors:
        for first, last in runs:
            start, end = _pages(tensor, first, last)
            if start < end:
                madvise(start, end - start, advice)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Successive numbers as (first, last + 1)."""
    first = previous = None
    for block in blocks:
        if previous is None or block != previous + 1:
            if first is not None and previous is not None:
                yield first, previous + 1
            first = block
        previous = block
    if first is not None and previous is not None:
        yield first, previous + 1


def _pages(tensor: torch.Tensor, first: int, last: int) -> tuple[int, int]:
    """The addresses of the pages that hold nothing but the blocks from `first` to before `last`."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "blocks lie one after the other on the host"
    block_bytes = tensor.stride(0) * tensor.itemsize
    start, end = tensor.data_ptr() + first * block_bytes, tensor.data_ptr() + last * block_bytes
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
