"""Blocks of evicted prefixes in host memory (`--kv-offload-gb`): the bytes behind the slots that the router hands out.

A block is a few kilobytes in each of many tensors, which PCIe moves slowly one by one. So blocks are gathered on the
device, some at a time, and move as one piece. Everything is queued on the stream of the steps, in the order of the
request: a block is copied out before the step that overwrites it, and back before the step that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from legato.layers.kv_cache import KVCache, KVShape
from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused
from legato.server.rows import to_device

# Bytes of one allocation: pinned memory comes in powers of two, so that one of all would be up to twice as large.
PIECE = 1 << 30
# Bytes of the buffer on the device in which blocks are gathered.
BUFFER = 256 << 20
WIDTHS = (torch.int64, torch.int32, torch.uint8)


class HostBlockStore:
    def __init__(self, shape: KVShape, block_size: int, num_bytes: int, device: torch.device) -> None:
        """In `num_bytes` of this shard's host memory. MemoryError or RuntimeError if there are not so many."""
        self._block_bytes = shape.block_bytes(block_size)
        self.num_slots = num_bytes // self._block_bytes
        self._per_piece = max(PIECE // self._block_bytes, 1)
        counts = [min(self._per_piece, self.num_slots - first) for first in range(0, self.num_slots, self._per_piece)]
        is_pinned = device.type == "cuda"
        self._pieces = [
            torch.empty(count, self._block_bytes, dtype=torch.uint8, pin_memory=is_pinned) for count in counts
        ]
        num_staged = min(max(BUFFER // self._block_bytes, 1), max(self.num_slots, 1))
        self._buffer = torch.empty(num_staged, self._block_bytes, dtype=torch.uint8, device=device)

    def run(self, request: pb.StepRequest, cache: KVCache) -> None:
        """The copies that a step asks for."""
        self._check(request.copied_out_slots, request.copied_out_blocks, cache.num_blocks)
        self._check(request.copied_in_slots, request.copied_in_blocks, cache.num_blocks)
        for blocks, slots in self._batches(request.copied_out_blocks, request.copied_out_slots):
            self._copy_out(cache, blocks, slots)
        for blocks, slots in self._batches(request.copied_in_blocks, request.copied_in_slots):
            self._copy_in(cache, blocks, slots)

    def _check(self, slots: Sequence[int], blocks: Sequence[int], num_blocks: int) -> None:
        if len(slots) != len(blocks):
            raise RequestRefused("copied blocks and slots: there must be as many blocks as slots")
        if any(slot >= self.num_slots for slot in slots) or any(block >= num_blocks for block in blocks):
            raise RequestRefused(f"copied blocks must be less than {num_blocks}, slots less than {self.num_slots}")

    def _batches(self, blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """As many at a time as the buffer holds, sorted by slot: a conversation is evicted from its end."""
        if not blocks:
            return
        size, order = len(self._buffer), np.argsort(slots)
        sorted_blocks, sorted_slots = np.array(blocks, dtype=np.int64)[order], np.array(slots)[order].tolist()
        for first in range(0, len(blocks), size):
            numbers = sorted_blocks[first : first + size].copy()
            yield to_device(numbers, self._buffer.device), sorted_slots[first : first + size]

    def _copy_out(self, cache: KVCache, blocks: torch.Tensor, slots: Sequence[int]) -> None:
        staged = self._buffer[: len(slots)]
        for tensor, part in self._parts(cache, staged):
            part.copy_(tensor.index_select(0, blocks))
        for place, piece in self._runs(slots):
            piece.copy_(staged[place], non_blocking=True)

    def _copy_in(self, cache: KVCache, blocks: torch.Tensor, slots: Sequence[int]) -> None:
        staged = self._buffer[: len(slots)]
        for place, piece in self._runs(slots):
            staged[place].copy_(piece, non_blocking=True)
        for tensor, part in self._parts(cache, staged):
            tensor.index_copy_(0, blocks, part)

    @staticmethod
    def _parts(cache: KVCache, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the cache as numbers [num_blocks, n], and its place in staged blocks [num_staged, n]. Numbers
        as wide as all of them allow: a device copies chosen blocks number by number."""
        tensors = list(map(_as_bytes, cache.tensors))
        wide = next(dtype for dtype in WIDTHS if all(each.shape[1] % dtype.itemsize == 0 for each in tensors))
        staged, first = staged.view(wide), 0
        for tensor in (each.view(wide) for each in tensors):
            yield tensor, staged[:, first : first + tensor.shape[1]]
            first += tensor.shape[1]

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Neighbouring slots: where they are in the list, and their bytes."""
        breaks = [i for i, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1 or b % self._per_piece == 0]
        for first, last in pairwise([0, *breaks, len(slots)]):
            piece, offset = divmod(slots[first], self._per_piece)
            yield slice(first, last), self._pieces[piece][offset : offset + last - first]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[num_blocks, ...] -> [num_blocks, bytes of a block]."""
    return tensor.view(torch.uint8).flatten(1)
