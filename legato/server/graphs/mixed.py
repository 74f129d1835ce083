"""Steps with prompt chunks as CUDA graphs, of up to a thousand tokens: beyond, the device has more to do than the host.

A graph is captured for a number of tokens, of any rows. It leaves room for as many decodes as a step may
have and for some chunks, and both kinds of attention find out on the device what there is: a decode that is not there
has no context, and to the chunks all decodes are a first sequence without one.
"""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import numpy as np
import torch

from legato.kernels.sample import greedy_sample
from legato.layers.kv_cache import KVCache
from legato.layers.shard import Shard
from legato.layers.step import ChunkSpans, Step
from legato.models.registry import CausalModel
from legato.server.graphs.captures import CapturePolicy
from legato.server.graphs.decode import Decoded, Graphs, Record
from legato.server.prepare import Packed
from legato.server.rows import Rows, RowStep, to_device

Numbers = TypeVar("Numbers", bound=np.ndarray | torch.Tensor)

MOST_CHUNKS = 64
# Longer contexts run eagerly. Attention is split for full batches here: too coarse for one long sequence among few, and
# such steps keep the device busy for longer than the host needs for their launches.
LONGEST_CONTEXT = 4096


class MixedInputs(Generic[Numbers]):
    """What a replay needs from the host, all of it int32 and in one piece, so that one copy brings it there."""

    def __init__(self, storage: Numbers, num_tokens: int, max_rows: int, max_sampled: int) -> None:
        num_sampled = min(num_tokens, max_sampled)
        self.num_decodes = min(num_tokens, max_rows)
        self.num_chunks = min(self.num_decodes, MOST_CHUNKS)
        num_sequences = self.num_decodes + 1 + self.num_chunks
        self._storage, self._taken = storage, 0
        self.input_ids = self._take(num_tokens)  # negative: the last token of the row
        self.positions = self._take(num_tokens)
        self.owners = self._take(num_tokens)  # their rows
        self.rows = self._take(num_sequences)  # decodes; all decodes as the chunks see them; chunks
        self.context_lens = self._take(num_sequences)
        self.chunk_starts = self._take(self.num_chunks + 2)
        self.sampled_tokens = self._take(num_sampled)
        self.sampled_rows = self._take(num_sampled)
        self.size = self._taken

    def _take(self, count: int) -> Numbers:
        first, self._taken = self._taken, self._taken + count
        return cast(Numbers, self._storage[first : self._taken])


class MixedGraphs(Graphs):
    counted = "tokens"

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        rows: Rows,
        policy: CapturePolicy,
        record: Record,
        shard: Shard,
        max_sampled: int,
    ) -> None:
        """`max_sampled` positions at which a step may sample, drafts included."""
        super().__init__(model, cache, rows, policy, record, shard)
        self._max_rows, self._max_sampled = rows.padding, max_sampled
        self._host = np.zeros(8 * policy.sizes[-1] + 4 * MOST_CHUNKS, dtype=np.int32)
        self._there = to_device(self._host, rows.device)
        # To copy logits here costs a hundredth of a step; a place for each graph would cost hundreds of megabytes.
        self._logits: torch.Tensor | None = None

    def run(self, parts: list[RowStep]) -> Decoded | None:
        """As `DecodeGraphs.run`, of parts with decodes first. The results are those of the parts that sample."""
        num_decodes = sum(part.decode for part in parts)
        if len(parts) - num_decodes > MOST_CHUNKS or any(part.start >= LONGEST_CONTEXT for part in parts):
            return None
        size = self.policy.choose(sum(part.count for part in parts))
        if size is None or sum(part.num_sampled for part in parts) > min(size, self._max_sampled):
            return None
        self._fill(size, Packed(self._rows, parts))
        return self._replay(size)

    def _fill(self, size: int, packed: Packed) -> None:
        inputs, d, num_tokens = self._cleared(size), packed.num_decodes, packed.ends[-1]
        first_chunk, num_chunks = inputs.num_decodes + 1, len(packed.rows) - d
        inputs.input_ids[:d] = -1
        inputs.input_ids[d:num_tokens] = packed.chunk_ids
        inputs.positions[:num_tokens] = packed.positions
        inputs.owners[:num_tokens] = packed.owners
        for numbers, of_sequences in ((inputs.rows, packed.rows), (inputs.context_lens, packed.context_lens)):
            numbers[:d] = of_sequences[:d]
            numbers[first_chunk : first_chunk + num_chunks] = of_sequences[d:]
        inputs.chunk_starts[1] = d
        inputs.chunk_starts[2 : 2 + num_chunks] = packed.ends[d:]
        inputs.chunk_starts[2 + num_chunks :] = num_tokens
        inputs.sampled_tokens[: len(packed.sampled_rows)] = packed.sampled_tokens
        inputs.sampled_rows[: len(packed.sampled_rows)] = packed.sampled_rows
        self._send(inputs.size)

    def _cleared(self, size: int) -> MixedInputs[np.ndarray]:
        """Nothing but padding."""
        inputs = MixedInputs(self._host, size, self._max_rows, self._max_sampled)
        self._host[: inputs.size] = 0
        for rows in (inputs.owners, inputs.rows, inputs.sampled_rows):
            rows[:] = self._rows.padding
        return inputs

    def _send(self, size: int) -> None:
        # A copy of the host's numbers travels: the next step may be written while it is on its way.
        self._there[:size].copy_(to_device(self._host[:size].copy(), self._rows.device), non_blocking=True)

    def _write_padding(self, size: int) -> None:
        self._send(self._cleared(size).size)

    def _compute(self, size: int) -> Decoded:
        rows, block_size = self._rows, self._cache.block_size
        inputs = MixedInputs(self._there, size, self._max_rows, self._max_sampled)
        last_tokens = rows.last_tokens[inputs.owners]
        blocks = rows.block_tables[inputs.owners, inputs.positions // block_size].long()
        step = Step(
            input_ids=torch.where(inputs.input_ids < 0, last_tokens, inputs.input_ids),
            positions=inputs.positions,
            slots=blocks * block_size + inputs.positions % block_size,
            logits_indices=inputs.sampled_tokens,
            num_decodes=inputs.num_decodes,
            rows=inputs.rows,
            block_tables=rows.block_tables,
            context_lens=inputs.context_lens,
            chunks=ChunkSpans(0, inputs.chunk_starts, None),
            on_host=None,
            adapters=self._adapters(inputs.owners),
        )
        hidden, logits = self._computed(step)
        token_ids, logprobs = greedy_sample(logits)
        rows.lengths[inputs.rows] = inputs.context_lens
        rows.last_tokens[inputs.sampled_rows] = token_ids
        return Decoded(self._kept(logits), token_ids, logprobs, hidden if self.keeps_hidden else None)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:  # while the first graph is captured, the largest
            self._logits = torch.empty_like(logits)
        return self._logits[: logits.shape[0]].copy_(logits)
