"""Steps as CUDA graphs: one replay instead of some three hundred launches. Here those of decodes alone.

A graph is captured for a number of rows and reads everything from the persistent rows, so a replay needs one thing
from the host: which rows. Batches are filled up to a captured size with the padding row. Which sizes are captured and
when is decided in `captures.py`.
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias, TypeVar

import numpy as np
import torch

from legato.kernels.rows import RowTables, advance_rows, gather_rows
from legato.kernels.sample import greedy_sample
from legato.layers.kv_cache import KVCache
from legato.layers.lora import StepAdapters
from legato.layers.shard import Shard
from legato.layers.step import Sides, Step
from legato.models.registry import CausalModel
from legato.server.graphs.captures import CapturePolicy
from legato.server.memory.budget import release
from legato.server.rows import Rows, to_device

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step writes: it stays valid until the next replay of any graph."""

    logits: torch.Tensor  # [size, vocab_size], of the rows that sample
    token_ids: torch.Tensor  # [size] int64, greedy
    logprobs: torch.Tensor  # [size] float32
    hidden: torch.Tensor | None = None  # [size, hidden_size], the states that the logits are of; if they are kept


Replay: TypeAlias = Callable[[], None]
# Captures a decode that has run before. Returns how to run it again, and where its results will be.
Record: TypeAlias = Callable[[Callable[[], Decoded]], tuple[Replay, Decoded]]


class CudaRecorder:
    """All graphs share one pool of memory: only one of them runs at a time.

    Torch's own context for captures gives all cached memory back to the driver, every time: the steps after it would
    have to ask for theirs anew.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, decode: Callable[[], T]) -> tuple[Replay, T]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.stream(self._stream):
            # Other threads go on reading the results of earlier steps.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                decoded = decode()
            except BaseException:
                with suppress(RuntimeError):  # which would only say that there was an error
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, decoded


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection frees may be another graph, and to free one ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graphs(ABC):
    """The graphs of one kind of step, one for each captured size."""

    counted: ClassVar[str]  # what sizes are numbers of

    def __init__(
        self, model: CausalModel, cache: KVCache, rows: Rows, policy: CapturePolicy, record: Record, shard: Shard
    ) -> None:
        self.policy = policy
        self._model = model
        self._cache = cache
        self._rows = rows
        self._record = record
        self._shard = shard
        self.keeps_hidden = False  # set before the first capture
        self._graphs: dict[int, tuple[Replay, Decoded]] = {}
        # Graphs of steps with adapters are others: those without do not even ask.
        self.has_adapters = False

    def _computed(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """States and logits."""
        adapters = self._rows.adapters
        if adapters is not None:
            adapters.device.begin(None)
        if step.adapters is not None:
            step.adapters.begin()
        hidden = self._model.forward(step, self._cache)
        return hidden, self._model.logits(hidden)

    def _adapters(self, owners: torch.Tensor) -> StepAdapters | None:
        """Read on the device, where any row may have any adapter: `owners` are the rows of the step's tokens."""
        if not self.has_adapters:
            return None
        assert self._rows.adapters is not None, "graphs with adapters are of shards that take them"
        return self._rows.adapters.of_tokens(owners)

    @abstractmethod
    def _compute(self, size: int) -> Decoded:
        """The step to capture. It reads what `_write_padding` or a run has written, and the rows."""

    @abstractmethod
    def _write_padding(self, size: int) -> None:
        """Let a step be of padding only: captures run it."""

    def dry_run(self, size: int) -> None:
        """Compute a step of padding eagerly, for what it compiles."""
        self._write_padding(size)
        self._compute(size)

    def _replay(self, size: int) -> Decoded:
        replay, decoded = self._graphs[size]
        replay()
        return decoded

    @torch.inference_mode()
    def capture(self, size: int) -> bool:
        """Unless that was done, or given up, in the meantime. False: it failed on some shard, and nothing
        but the graph is lost.

        Shards that pad a step to different sizes would wait for each other for ever: all of them have a graph, or none.
        """
        if not self.policy.num_pending or size in self.policy.captured:
            return True
        started = time.perf_counter()
        self._write_padding(size)
        compute = partial(self._compute, size)
        has_run, cause = False, "on another shard"
        try:
            compute()  # compiles and warms what a capture must not
            has_run = True
            self._graphs[size] = self._record(compute)
        except (RuntimeError, MemoryError) as error:
            if not has_run and self._shard.world_size > 1:
                raise  # the others may be waiting in a collective of this step, and cannot be asked
            cause = str(error).partition("\n")[0]
        if self._shard.least(int(size in self._graphs), self._rows.device):
            self.policy.note(size)
            logger.debug("Captured a step of %d %s in %.2f s", size, self.counted, time.perf_counter() - started)
            return True
        logger.warning("CUDA graph capture failed for %d %s (%s); this size runs eagerly.", size, self.counted, cause)
        self._graphs.pop(size, None)
        release(self._rows.device)  # here, where the error no longer holds what it failed with
        return False


class DecodeGraphs(Graphs):
    counted = "rows"

    def __init__(
        self, model: CausalModel, cache: KVCache, rows: Rows, policy: CapturePolicy, record: Record, shard: Shard
    ) -> None:
        super().__init__(model, cache, rows, policy, record, shard)
        self._row_numbers = torch.full((policy.sizes[-1],), rows.padding, dtype=torch.int32, device=rows.device)
        self._written: list[int] = []  # what they are, as far as they are known

    def run(self, row_numbers: list[int]) -> Decoded | None:
        """One decode of these rows: greedy tokens are chosen and fed back, the logits are there for other choices.

        None, and nothing has happened, where no graph fits.
        """
        size = self.policy.choose(len(row_numbers))
        if size is None:
            return None
        filled = row_numbers + [self._rows.padding] * (size - len(row_numbers))
        if self._written[:size] != filled:  # most steps have the rows of the step before
            numbers = to_device(np.array(filled, dtype=np.int32), self._rows.device)
            self._row_numbers[:size].copy_(numbers, non_blocking=True)
            self._written = filled
        return self._replay(size)

    def _write_padding(self, size: int) -> None:
        self._row_numbers[:size].fill_(self._rows.padding)
        self._written = []

    def _compute(self, size: int) -> Decoded:
        row_numbers = self._row_numbers[:size]
        rows = self._rows
        tables = RowTables(rows.block_tables, rows.lengths, rows.last_tokens, self._cache.block_size, rows.padding)
        inputs = gather_rows(row_numbers, tables)
        sides = None
        if rows.encoder_lens is not None:
            sides = Sides([], None, None, row_numbers, rows.encoder_lens[row_numbers])
        step = Step(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            logits_indices=None,
            num_decodes=size,
            rows=row_numbers,
            block_tables=rows.block_tables,
            context_lens=inputs.context_lens,
            chunks=None,
            on_host=None,
            sides=sides,
            adapters=self._adapters(row_numbers),
        )
        hidden, logits = self._computed(step)
        token_ids, logprobs = greedy_sample(logits)
        advance_rows(row_numbers, token_ids, tables)
        return Decoded(logits, token_ids, logprobs, hidden if self.keeps_hidden else None)
