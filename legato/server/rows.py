"""Persistent rows: one per running request, written once at admission and advanced by every step.

The router owns the row numbers and the blocks. The state of a row is here, on the host where shapes are decided and on
the device where they are used. The last sampled token is on the device only: the next step reads it there, so that no
step waits for a copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from legato.layers.lora import DeviceAdapters, StepAdapters


@dataclass(slots=True)
class RowState:
    """What the host knows of the request in a row. `known` counts sampled tokens too, `input_ids` does not."""

    request_id: int
    input_ids: np.ndarray  # int64, the tokens that came with the admission
    known: int
    computed: int
    num_blocks: int
    prompt_logprobs: bool
    num_top_tokens: int  # likeliest tokens to report with each of them
    encoder_len: int = 0  # leading tokens that the encoder reads


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's part in a step: it computes tokens [start, start + count)."""

    row: int
    start: int
    count: int
    samples: bool
    decode: bool  # the one token is the last sampled one, on the device
    num_whole: int = 0  # leading tokens that one forward must compute: those of the encoder and the next, or all drafts
    # Guesses at what follows the last known token, which is the first of `count`. It samples after each of them.
    draft_ids: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Positions at which it samples."""
        return 1 + len(self.draft_ids) if self.samples else 0


class RowAdapters:
    """Which slot of the device's adapters each row uses."""

    def __init__(self, adapters: DeviceAdapters, num_rows: int, device: torch.device) -> None:
        self.device = adapters
        self.slots = torch.full((num_rows,), adapters.none, dtype=torch.int64, device=device)
        self._on_host = [adapters.none] * num_rows
        self._new: dict[int, int] = {}  # what the device does not know yet

    def set(self, row: int, slot: int | None) -> None:
        self._on_host[row] = self._new[row] = self.device.none if slot is None else slot

    def write(self) -> None:
        """Copy to the device what is new: one copy for all rows of a step."""
        if self._new:
            new = to_device(np.array([*self._new.items()], dtype=np.int64).T.copy(), self.slots.device)
            self.slots[new[0]] = new[1]
            self._new.clear()

    def are_used_by(self, parts: list[RowStep]) -> bool:
        return any(self._on_host[part.row] != self.device.none for part in parts)

    def of_tokens(self, owners: torch.Tensor) -> StepAdapters:
        """`owners` [T] are the tokens' rows."""
        return StepAdapters(self.device, self.slots[owners])


class Rows:
    """`padding` is a row beyond the router's: captured graphs fill up with it, and its writes go to block 0."""

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        has_encoder: bool = False,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self.device = device
        self.adapters = None if adapters is None else RowAdapters(adapters, max_rows + 1, device)
        self.padding = max_rows
        self.sequences: list[RowState | None] = [None] * max_rows
        self.block_tables = torch.zeros(max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)  # computed tokens, for graphs
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.encoder_lens = torch.zeros(max_rows + 1, dtype=torch.int32, device=device) if has_encoder else None
        # Rows of a failed step: the device's state is behind the host's. The router may have sent another step for them
        # before it knew; a graph would then write to blocks of other requests.
        self.out_of_sync: set[int] = set()
        # By row: (first index in its table, blocks). What could not be written stays for the next step, unless another
        # request has the row by then.
        self._new_blocks: dict[int, list[tuple[int, list[int]]]] = {}
        self._new_encoder_lens: dict[int, int] = {}  # by row

    def __getitem__(self, row: int) -> RowState:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        return sequence

    def wants_scores(self, part: RowStep) -> bool:
        """Whether the log probabilities of this part's tokens are wanted: it is part of a prompt, then."""
        return self[part.row].prompt_logprobs and not part.decode and not part.draft_ids

    def adapters_of(self, parts: list[RowStep], owners: np.ndarray) -> StepAdapters | None:
        """Of a step's tokens, whose rows are `owners`; None if none of them has one."""
        if self.adapters is None or not self.adapters.are_used_by(parts):
            return None
        return self.adapters.of_tokens(to_device(owners, self.device))

    def admit(
        self,
        row: int,
        request_id: int,
        input_ids: np.ndarray | list[int],
        num_cached: int,
        prompt_logprobs: bool,
        num_top_tokens: int = 0,
        num_generated: int = 0,
    ) -> None:
        """The last `num_generated` of the tokens were sampled. In an encoder-decoder model the tokens before them are
        those of the encoder and the decoder's start token."""
        ids = np.asarray(input_ids, dtype=np.int64)
        sequence = RowState(request_id, ids, len(ids), num_cached, 0, prompt_logprobs, num_top_tokens)
        self._new_blocks.pop(row, None)
        if self.encoder_lens is not None:
            sequence.encoder_len = self._new_encoder_lens[row] = len(ids) - num_generated - 1
            sequence.prompt_logprobs = False  # an encoder predicts no token
        self.sequences[row] = sequence

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        sequence = self[row]
        first, last = sequence.num_blocks, sequence.num_blocks + len(blocks)
        assert last <= self.block_tables.shape[1], f"row {row} would have {last} blocks"
        if blocks:
            self._new_blocks.setdefault(row, []).append((first, blocks))
        sequence.num_blocks = last

    def write_blocks(self) -> None:
        """Copy new blocks to the device: one copy for all rows of a step, none where no row grew."""
        if self.adapters is not None:
            self.adapters.write()
        if self.encoder_lens is not None and self._new_encoder_lens:
            lens = to_device(np.array([*self._new_encoder_lens.items()], dtype=np.int64).T.copy(), self.device)
            self.encoder_lens[lens[0]] = lens[1].int()
            self._new_encoder_lens.clear()
        if self._new_blocks:
            runs = [(row, *run) for row, runs in self._new_blocks.items() for run in runs]
            counts = [len(blocks) for _, _, blocks in runs]
            new = np.empty((3, sum(counts)), dtype=np.int64)
            new[0] = np.repeat([row for row, _, _ in runs], counts)
            new[1] = np.concatenate([np.arange(first, first + len(blocks)) for _, first, blocks in runs])
            new[2] = list(chain.from_iterable(blocks for _, _, blocks in runs))
            there = to_device(new, self.device)
            self.block_tables[there[0], there[1]] = there[2].int()
            self._new_blocks.clear()

    def advance(self, row: int, count: int, draft_ids: tuple[int, ...] = ()) -> RowStep:
        """Count `count` more computed tokens. A row whose known tokens are then all computed samples one. Drafts count
        as rejected: `accept_drafts` counts those that are not."""
        sequence = self[row]
        start = sequence.computed
        sequence.computed += count - len(draft_ids)
        assert sequence.computed <= sequence.known, f"row {row} was asked to compute tokens it does not have"
        samples = sequence.computed == sequence.known
        decode = start >= len(sequence.input_ids)
        sequence.known += samples
        num_whole = sequence.encoder_len + 1 if start < sequence.encoder_len else 0
        assert not num_whole or (start == 0 and count >= num_whole), f"row {row}: an encoder reads its prompt at once"
        if not draft_ids:
            return RowStep(row, start, count, samples, decode, num_whole)
        assert samples and count == len(draft_ids) + 1, f"row {row}: drafts follow the last known token, alone"
        return RowStep(row, start, count, samples, False, count, draft_ids)

    def accept_drafts(self, parts: list[RowStep], num_sampled: list[int], last_tokens: list[int]) -> None:
        """Each part has got so many tokens, and goes on with the last of them."""
        for part, count in zip(parts, num_sampled, strict=True):
            self[part.row].known += count - 1
            self[part.row].computed += count - 1
        numbers = [[part.row for part in parts], [self[part.row].computed for part in parts], last_tokens]
        there = to_device(np.array(numbers, dtype=np.int64), self.device)
        self.lengths[there[0]] = there[1].int()
        self.last_tokens[there[0]] = there[2]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Through pinned memory to a GPU, so that the copy is queued and not waited for."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
