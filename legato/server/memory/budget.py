"""How much memory the KV cache may take, and what happens when memory runs out.

On a GPU warm-up runs the largest step that it may ever get and reads what that took at its peak:

    device   ├ others ┼── weights ──┼─ peak of a step ─┼ graphs ┼ reserve ┼──────── KV cache ────────┤
             └─ taken ┴──── Reading.peak, torch's ─────┴──── computed ────┴──── what is left ────────┘

`--cuda-memory-fraction` bounds everything but `others`. Only `measure` touches a device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import torch

from legato.server.interceptor import RequestRefused
from legato.server.memory.capacity import HOST_SHARE, LAYER_GRAPH_BYTES, reserve

# Messages of errors that torch does not type: the CPU's allocator, cuBLAS, the driver.
OUT_OF_MEMORY_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "_ALLOC_FAILED")


class OutOfMemory(RequestRefused):
    """A step did not fit into memory. Its requests fail; the shard keeps running."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Out of memory: {message}", grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of a CUDA device, once the largest step has run."""

    total: int
    free: int  # after torch has released what it does not use
    reserved: int  # held by torch at that time: the weights
    peak: int  # the most that torch held during the step

    @property
    def others(self) -> int:
        """Not allocated by torch: other processes, the driver, libraries."""
        return self.total - self.free - self.reserved


def cache_budget(reading: Reading, fraction: float, graphs: int = 0) -> int:
    """Bytes for the KV cache: what our share leaves, and no more than is free. Negative if the rest does not fit."""
    available = min(int(fraction * reading.total), reading.total - reading.others)
    return available - reading.peak - graphs - reserve(reading.total)


def graph_bytes(
    kept_rows: Sequence[int], largest: int, num_layers: int, row_bytes: int, step_tokens: int, step_bytes: int
) -> int:
    """What all graphs will take: each keeps its results, `row_bytes` a row, and they share one working space, which is
    to that of the largest step as the tokens of the largest graph are to the step's."""
    if not kept_rows:
        return 0
    working = step_bytes * min(largest, step_tokens) // step_tokens
    return sum(kept_rows) * row_bytes + len(kept_rows) * num_layers * LAYER_GRAPH_BYTES + working


def largest_step(max_rows: int, longest: int, step_tokens: int) -> list[int]:
    """Tokens of each row in the largest step: all rows sample, and the first ones bring as much as they may."""
    left = max(step_tokens, max_rows) - max_rows
    counts = []
    for _ in range(max_rows):
        more = min(longest - 1, left)
        counts.append(1 + more)
        left -= more
    return counts


def measure(run: Callable[[], None], device: torch.device) -> Reading:
    """What `run` took of a CUDA device."""
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    release(device)
    free, total = torch.cuda.mem_get_info(device)
    return Reading(total, free, torch.cuda.memory_reserved(device), peak)


def host_budget(fraction: float) -> int:
    """Bytes for the KV cache where the host computes."""
    return int(available_ram() * HOST_SHARE * fraction)


def release(device: torch.device) -> None:
    """Empty torch's cache of free memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


@contextmanager
def refused_for_memory(message: str, device: torch.device) -> Iterator[None]:
    """An allocation that fails inside becomes an `OutOfMemory`."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release(device)  # here, where the error no longer holds what it failed with
    raise OutOfMemory(message)


def available_ram() -> int:
    """Available without swapping; half of all memory where the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
