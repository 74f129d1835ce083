"""Decode steps as CUDA graphs: one replay instead of some three hundred launches.

A graph is captured for a number of rows and reads everything from the persistent rows, so a replay needs one thing
from the host: which rows. Batches are filled up to the next captured size with the padding row. A size is captured
when it is first needed; nobody waits for sizes that never come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from legato.kernels.sample import greedy_sample
from legato.layers.kv_cache import KVCache
from legato.layers.step import Step
from legato.models.registry import CausalModel
from legato.server.rows import Rows, to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """What a replay writes: it stays valid until the next replay of any size."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, vocab_size]
    token_ids: torch.Tensor  # [size] int64, greedy
    logprobs: torch.Tensor  # [size] float32


def bucket(num_rows: int) -> int:
    """The size to capture for a batch: exact for few rows, then in steps that waste at most about a tenth."""
    if num_rows <= 8:
        return num_rows
    step = 8 if num_rows <= 128 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


class DecodeGraphs:
    """`sizes` are the only ones to capture, if given; larger batches then run without a graph."""

    def __init__(self, model: CausalModel, cache: KVCache, rows: Rows, sizes: Sequence[int] = ()) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sizes = sorted(sizes)
        most = max(bucket(len(rows.sequences)), *sizes, 1)
        self._row_numbers = torch.full((most,), rows.padding, dtype=torch.int32, device=rows.device)
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int | None:
        if not self._sizes:
            return bucket(num_rows)
        return next((size for size in self._sizes if size >= num_rows), None)

    def run(self, row_numbers: list[int]) -> DecodeGraph:
        """One decode of these rows: greedy tokens are chosen and fed back, the logits are there for other choices."""
        size = self.size_for(len(row_numbers))
        assert size is not None, f"no graph for {len(row_numbers)} rows"
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        filled = np.full(size, self._rows.padding, dtype=np.int32)
        filled[: len(row_numbers)] = row_numbers
        self._row_numbers[:size].copy_(to_device(filled, self._rows.device), non_blocking=True)
        captured = self._graphs[size]
        captured.graph.replay()
        return captured

    def _capture(self, size: int) -> DecodeGraph:
        started = time.perf_counter()
        row_numbers = self._row_numbers[:size]
        row_numbers.fill_(self._rows.padding)
        self._decode(row_numbers)  # compiles and warms what a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, token_ids, logprobs = self._decode(row_numbers)
        logger.debug("Captured a decode of %d rows in %.2f s", size, time.perf_counter() - started)
        return DecodeGraph(graph, logits, token_ids, logprobs)

    def _decode(self, row_numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, size = self._rows, self._cache.block_size
        positions = rows.lengths[row_numbers]
        blocks = rows.block_tables[row_numbers, positions // size]
        step = Step(
            input_ids=rows.last_tokens[row_numbers],
            positions=positions,
            slots=blocks * size + positions % size,
            logits_indices=None,
            num_decodes=row_numbers.shape[0],
            rows=row_numbers,
            block_tables=rows.block_tables,
            context_lens=positions + 1,
            chunks=None,
            on_host=None,
        )
        logits = self._model.logits(self._model.forward(step, self._cache))
        token_ids, logprobs = greedy_sample(logits)
        rows.last_tokens[row_numbers] = token_ids
        # The padding row stays empty however often it takes part.
        rows.lengths[row_numbers] = torch.where(row_numbers == rows.padding, 0, positions + 1)
        return logits, token_ids, logprobs
