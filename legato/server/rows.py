"""Persistent rows: one place per running request, written once at admission and advanced by every step.

The router owns the row numbers and the blocks. What a row knows is here, on the host where shapes are decided and on
the device where they are used. The last sampled token lives only on the device: the next step reads it there, so
nothing waits until it has travelled to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True)
class Sequence:
    """What the host must know of the request in a row. `known` counts sampled tokens too, `input_ids` does not."""

    request_id: int
    input_ids: np.ndarray  # int64, the tokens that came with the admission
    known: int
    computed: int
    num_blocks: int
    prompt_logprobs: bool
    num_top_tokens: int  # how many likeliest tokens to tell with each of them


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's part in a step: it computes tokens [start, start + count)."""

    row: int
    start: int
    count: int
    samples: bool
    decode: bool  # the one token is the last sampled one, on the device


class Rows:
    """`padding` is a row beyond the router's: captured graphs fill up with it, and its writes go to block 0."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.padding = max_rows
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.block_tables = torch.zeros(max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)  # computed tokens, for graphs
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._new_blocks: list[tuple[int, int, int]] = []  # row, place in its table, block

    def __getitem__(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        return sequence

    def admit(
        self,
        row: int,
        request_id: int,
        input_ids: list[int],
        num_cached: int,
        prompt_logprobs: bool,
        num_top_tokens: int = 0,
    ) -> None:
        ids = np.array(input_ids, dtype=np.int64)
        self.sequences[row] = Sequence(request_id, ids, len(ids), num_cached, 0, prompt_logprobs, num_top_tokens)

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        sequence = self[row]
        first, last = sequence.num_blocks, sequence.num_blocks + len(blocks)
        assert last <= self.block_tables.shape[1], f"row {row} would have {last} blocks"
        self._new_blocks.extend(zip([row] * len(blocks), range(first, last), blocks, strict=True))
        sequence.num_blocks = last

    def write_blocks(self) -> None:
        """Bring the tables up to date: one copy for all rows of a step, and none where no row grew."""
        if self._new_blocks:
            new = to_device(np.array(self._new_blocks, dtype=np.int64).T.copy(), self.device)
            self.block_tables[new[0], new[1]] = new[2].int()
            self._new_blocks.clear()

    def advance(self, row: int, count: int) -> RowStep:
        """Book `count` more computed tokens. A row whose known tokens are then all computed samples one."""
        sequence = self[row]
        start = sequence.computed
        sequence.computed += count
        assert sequence.computed <= sequence.known, f"row {row} was asked to compute tokens it does not have"
        samples = sequence.computed == sequence.known
        decode = start >= len(sequence.input_ids)
        sequence.known += samples
        return RowStep(row, start, count, samples, decode)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Pinned on the way to a GPU, so that the copy is queued instead of waited for."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
