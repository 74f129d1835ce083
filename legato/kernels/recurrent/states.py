"""Where the states of a layer are in the cache, and which of them a step reads and writes.

Sequence i brings tokens [first, first + count) of the step, the last of its `context_lens[i]`. A block of the cache has
the state after the last of its tokens that was computed: it is read from the block of the token before the first one,
and written wherever a block or the sequence's part of the step ends.

A sequence of no tokens, or whose context is empty, is padding: nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """The sequences that bring one token: [m] int64 each."""

    tokens: Tensor  # of the step
    read: Tensor  # the block with the state before the token; any block where the token is the first
    is_first: Tensor  # [m] bool
    write: Tensor  # the block with the state after it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [first, last) of the step in one block. `read` is the block with the state before them, None: there is
    none, they begin the sequence."""

    first: int
    last: int
    read: int | None
    write: int


@dataclass(frozen=True)
class StateSequences:
    """The same for all layers. `singles` and `stretches` are for the versions in torch."""

    block_tables: Tensor  # [max_rows, max_blocks] int32
    rows: Tensor  # [n] int32
    context_lens: Tensor  # [n] int32
    firsts: Tensor  # [n] int32
    counts: Tensor  # [n] int32
    block_size: int

    @cached_property
    def singles(self) -> SingleTokens:
        chosen = ((self.counts == 1) & (self.context_lens > 0)).nonzero()[:, 0]
        rows, positions = self.rows[chosen].long(), self.context_lens[chosen].long() - 1
        read = self.block_tables[rows, (positions - 1).clamp(min=0) // self.block_size].long()
        write = self.block_tables[rows, positions // self.block_size].long()
        return SingleTokens(self.firsts[chosen].long(), read, positions == 0, write)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Of each sequence that brings more tokens, one after the other."""
        return list(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        size, tables = self.block_size, self.block_tables
        columns = (self.rows, self.context_lens, self.firsts, self.counts)
        for row, context, first, count in zip(*(column.tolist() for column in columns), strict=True):
            if context == 0 or count < 2:
                continue
            position, end, table = context - count, first + count, tables[row]
            while first < end:
                here = min(end - first, size - position % size)
                read = int(table[(position - 1) // size]) if position else None
                yield Stretch(first, first + here, read, int(table[position // size]))
                first, position = first + here, position + here


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """States of channels: [num_blocks, half, width] float32 of the first half of the channels, and the same of the
    others. The last columns are the last inputs of a convolution."""

    lower: Tensor
    upper: Tensor
    sequences: StateSequences

    def read(self, blocks: int | Tensor, channels: int) -> Tensor:
        """[channels, width], or [m, channels, width] of several blocks [m]; a copy."""
        return torch.cat((self.lower[blocks], self.upper[blocks]), dim=-2)[..., :channels, :]

    def write(self, blocks: int | Tensor, columns: slice, state: Tensor) -> None:
        """state [channels, ...] or [m, channels, ...], into these columns."""
        half, channels = self.lower.shape[1], state.shape[-2]
        self.lower[blocks, : min(half, channels), columns] = state[..., :half, :]
        if channels > half:
            self.upper[blocks, : channels - half, columns] = state[..., half:, :]
