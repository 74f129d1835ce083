"""A draft model or an EAGLE-3 head in the shard, which proposes tokens after those that the model has sampled.

It has a KV cache of its own with as many blocks, and a row's keys and values are in the blocks that the router gave the
row: a prefix that is cached for the large model is cached for the small one. Where it has not read a row's text so far,
because no guesses were asked for, it reads what is missing when some are, at most `MOST_READ` tokens a step. What it
proposes is verified as any draft is: a wrong guess costs time and changes no text.

    read       the tokens of each row that it has not seen, the one just sampled included      a forward of chunks
    go on      from the likeliest token, or the one that the row's noise chooses, `count - 1` times

Guesses may run beyond the row's last block. Each row has some blocks of its own for that, behind the router's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from legato.kernels.attention.paged import PagedContext
from legato.layers.kv_cache import KVCache
from legato.layers.step import ChunkSpans, Step
from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import HUGE
from legato.sampling.sampler import Sampler
from legato.server.rows import Rows, RowStep, to_device
from legato.server.speculation.guessers import Guesser

# Tokens that the draft model reads in one step, to catch up with prompts.
MOST_READ = 1024
# Guesses behind a sampled token at most, and the blocks behind a row's own that they need.
MOST_TOKENS = 16
NOT_GUESSED = -1


def num_spare_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of each row behind the router's, for the token that was sampled last and so many guesses."""
    return -(-num_tokens // block_size) + 1


@dataclass(slots=True)
class DraftRow:
    """What the draft model has read of a row's text, and what it guessed last, from `guessed_at` on. The row had blocks
    for `room` tokens then."""

    num_read: int = 0
    num_blocks: int = 0
    guessed_at: int = 0
    room: int = 0
    guesses: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows whose text is read to its end, how long it is, and what the draft model says next."""

    rows: list[int]
    ends: list[int]
    token_ids: torch.Tensor  # [rows]
    states: torch.Tensor  # [rows, size], that it goes on from


NOBODY = ReadRows([], [], torch.zeros(0, dtype=torch.int64), torch.zeros(0))


class DraftModel:
    """Called by the engine for every step, in order."""

    def __init__(self, guesser: Guesser, rows: Rows, sampler: Sampler, base: KVCache, num_tokens: int) -> None:
        assert 0 < num_tokens <= MOST_TOKENS
        self.num_tokens = num_tokens
        self._guesser = guesser
        guesser.attach(base.num_blocks * base.block_size)
        self._rows, self._sampler, self._device = rows, sampler, rows.device
        self._block_size = base.block_size
        self._num_spare = num_spare_blocks(num_tokens, base.block_size)
        self._first_spare = base.num_blocks
        num_rows, num_blocks = rows.padding, base.num_blocks + rows.padding * self._num_spare
        self.cache = KVCache(guesser.kv_shape, num_blocks, base.block_size, self._device)
        self._state = [DraftRow() for _ in range(num_rows)]
        # The router's blocks of each row, and the spare ones behind them.
        self._tables = np.zeros((num_rows, rows.block_tables.shape[1] + self._num_spare), dtype=np.int32)
        # Of each block, how many tokens from its first on the draft model has read.
        self._filled = np.zeros(num_blocks, dtype=np.int32)
        # Of each slot, its token: those that were sampled are on the device alone.
        self._ids = torch.zeros(num_blocks * base.block_size, dtype=torch.int64, device=self._device)

    def begin(self, request: pb.StepRequest) -> None:
        """Rows get other requests, and blocks."""
        for admission in request.admitted:
            state = self._state[admission.row] = DraftRow()
            self._append(admission.row, list(admission.blocks))
            # What is cached was computed for another request, and may or may not have been read by the draft model.
            for block in admission.blocks:
                state.num_read += int(self._filled[block])
                if self._filled[block] < self._block_size:
                    break
        first, blocks = 0, list(request.new_blocks)
        for row, count in zip(request.rows, request.num_new_blocks, strict=True):
            if count:
                self._filled[blocks[first : first + count]] = 0
                self._append(row, blocks[first : first + count])
                first += count

    def note(self, parts: list[RowStep]) -> None:
        """These tokens are about to be computed: those that were sampled, and drafts."""
        numbers: list[tuple[int, int, int]] = []
        for part in parts:
            if part.decode or part.draft_ids:
                numbers.append((part.row, self._slot(part.row, part.start), NOT_GUESSED))
                places = enumerate(part.draft_ids, part.start + 1)
                numbers += [(part.row, self._slot(part.row, place), token) for place, token in places]
        if numbers:
            there = to_device(np.array(numbers, dtype=np.int64).T.copy(), self._device)
            self._ids[there[1]] = torch.where(there[2] < 0, self._rows.last_tokens[there[0]], there[2])

    def propose(self, parts: list[RowStep], sampled: list[list[int]], count: int) -> torch.Tensor:
        """[n, count] tokens that may follow what these parts have sampled; `NOT_GUESSED` where it has not read
        enough. `sampled` are the tokens that each has got, where the host knows them."""
        count = min(count, self.num_tokens)
        found = torch.full((len(parts), count), NOT_GUESSED, device=self._device)
        rows = [part.row for part in parts]
        ready = self._read(rows, dict(zip(rows, sampled, strict=False)), count)
        if not ready.rows:
            return found
        rows, ends, states = ready.rows, ready.ends, ready.states
        guesses = [ready.token_ids]
        for depth in range(1, count):
            starts = [end - self._guesser.shift + depth - 1 for end in ends]
            states, logits = self._forward(rows, starts, [1] * len(rows), guesses[-1], states)
            guesses.append(self._choose(logits, rows, depth))
        stacked = torch.stack(guesses, 1)
        for row, end, line in zip(rows, ends, stacked.tolist(), strict=True):
            state = self._state[row]
            state.guessed_at, state.guesses, state.room = end, line, state.num_blocks * self._block_size
        place_of = {part.row: place for place, part in enumerate(parts)}
        found[to_device(np.array([place_of[row] for row in rows]), self._device)] = stacked
        return found

    # ---- catching up ----------------------------------------------------------------------------------------------

    def _read(self, rows: list[int], sampled: dict[int, list[int]], count: int) -> ReadRows:
        """Read what is missing of these rows, as far as a step goes, and guess the first token of those that are
        complete."""
        left, spans = MOST_READ, []
        longest = min(self._guesser.max_positions, self._tables.shape[1] * self._block_size)
        for row in rows:
            state, known = self._state[row], self._rows[row].known
            self._keep_right_guesses(state, known, sampled.get(row, []))
            taken = min(known - self._guesser.shift - state.num_read, left)
            if taken > 0 and known + count <= longest:
                spans.append((row, state.num_read, taken))
                left -= taken
        if not spans:
            return NOBODY
        ids = self._ids_of(spans)
        read = [row for row, _, _ in spans]
        states, logits = self._forward(read, [s for _, s, _ in spans], [n for _, _, n in spans], ids, None)
        complete = []
        for place, (row, start, taken) in enumerate(spans):
            self._count(row, start + taken)
            if start + taken == self._rows[row].known - self._guesser.shift:
                complete.append(place)
        chosen = [spans[place][0] for place in complete]
        if not chosen:
            return NOBODY
        if len(complete) < len(spans):
            there = to_device(np.array(complete), self._device)
            logits, states = logits[there], states[there]
        return ReadRows(chosen, [self._rows[row].known for row in chosen], self._choose(logits, chosen, 0), states)

    def _keep_right_guesses(self, state: DraftRow, known: int, sampled: list[int]) -> None:
        """The keys and values of guesses that were sampled are there already, but those of the last guess. (Those of
        an EAGLE-3 head were made of its own states, and are made again of the base model's.)"""
        if self._guesser.shift == 0 and state.guesses and state.guessed_at == known - len(sampled) == state.num_read:
            for guess, token in zip(state.guesses[:-1], sampled, strict=False):
                if guess != token or state.num_read >= min(state.room, known - 1):
                    break
                state.num_read += 1
        state.guesses = []

    def _count(self, row: int, end: int) -> None:
        """The row's tokens up to `end` are read. What is behind its last block will have to be read again."""
        state, size = self._state[row], self._block_size
        before, state.num_read = state.num_read, min(end, state.num_blocks * size)
        for place in range(before // size, -(-state.num_read // size)):
            self._filled[self._tables[row, place]] = min(size, state.num_read - place * size)

    def _ids_of(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Prompts from the host, what was sampled from the device: the last token is not in the cache yet."""
        parts, lasts, last_rows, end = [], [], [], 0
        slots: list[np.ndarray] = []
        for row, first, count in spans:
            start = first + self._guesser.shift
            prompt = self._rows[row].input_ids[start : start + count]
            parts.append(np.concatenate((prompt, np.full(count - len(prompt), NOT_GUESSED))).astype(np.int64))
            slots.append(self._slots(row, start, count))
            end += count
            if start + count == self._rows[row].known:
                lasts.append(end - 1)
                last_rows.append(row)
        there = to_device(np.stack((np.concatenate(parts), np.concatenate(slots))), self._device)
        ids = torch.where(there[0] < 0, self._ids[there[1]], there[0])
        if lasts:
            newest = to_device(np.array((lasts, last_rows), dtype=np.int64), self._device)
            ids[newest[0]] = self._rows.last_tokens[newest[1]]
        return ids

    # ---- computing ------------------------------------------------------------------------------------------------

    def _forward(
        self, rows: list[int], starts: list[int], counts: list[int], ids: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and logits of the last token of each row."""
        size, device = self._block_size, self._device
        ends = np.cumsum(counts)
        context_lens = np.array(starts, dtype=np.int32) + np.array(counts, dtype=np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slots = np.concatenate([self._slots(row, s, n) for row, s, n in zip(rows, starts, counts, strict=True)])
        tables = torch.from_numpy(self._tables[rows, : -(-int(context_lens.max()) // size)])
        num_decodes = len(rows) if all(count == 1 for count in counts) else 0
        chunks = None
        if not num_decodes:
            cu_seqlens = np.concatenate((np.zeros(1), ends)).astype(np.int32)
            chunks = ChunkSpans(0, to_device(cu_seqlens, device), None)
        on_host = None
        if device.type == "cpu":
            dtype = self._guesser.kv_shape.dtype
            on_host = PagedContext(list(counts), context_lens.tolist(), num_decodes, tables, size, dtype)
        step = Step(
            input_ids=ids.clamp(max=self._guesser.vocab_size - 1),
            positions=to_device(positions, device),
            slots=to_device(slots, device),
            logits_indices=to_device(ends - 1, device),
            num_decodes=num_decodes,
            rows=torch.arange(len(rows), dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            context_lens=to_device(context_lens, device),
            chunks=chunks,
            on_host=on_host,
        )
        return self._guesser.compute(step, self.cache, states)

    def _choose(self, logits: torch.Tensor, rows: list[int], ahead: int) -> torch.Tensor:
        """What the large model would choose from these logits."""
        if self._sampler.is_greedy(rows):
            return logits.argmax(-1)
        logits = F.pad(logits, (0, self._sampler.vocab_size - logits.shape[1]), value=-HUGE)
        there = torch.full((len(rows),), ahead, device=self._device)
        return self._sampler.sample_ahead(logits, rows, there).token_ids

    def _append(self, row: int, blocks: list[int]) -> None:
        state = self._state[row]
        first, end = state.num_blocks, state.num_blocks + len(blocks)
        self._tables[row, first:end] = blocks
        spare = self._first_spare + row * self._num_spare
        self._tables[row, end : end + self._num_spare] = range(spare, spare + self._num_spare)
        state.num_blocks = end

    def _slots(self, row: int, start: int, count: int) -> np.ndarray:
        positions = np.arange(start, start + count)
        blocks = self._tables[row, positions // self._block_size].astype(np.int64)
        slots: np.ndarray = blocks * self._block_size + positions % self._block_size
        return slots

    def _slot(self, row: int, position: int) -> int:
        return int(self._tables[row, position // self._block_size]) * self._block_size + position % self._block_size
