"""One stage of a pipeline: what comes from the stage before, and what goes to the one behind.

    first stage                       last stage                    links form a ring
    embed, layers ──hidden states──►  layers, logits, sample
          ◄───────────tokens─────────

All stages get every step from the router, in the same order, and keep the same rows. A stage computes step t + 1 while
the one behind computes step t; the first stage waits for the tokens of a row only when a step needs them. The router
divides decoding rows among steps so that these are those of other rows (`scheduling/micro_batches.py`).

With several shards in a stage, each sends its span of the columns, and they are gathered within the next stage.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from legato.cluster.frames import BrokenLink
from legato.cluster.links import TensorLink
from legato.layers.shard import Shard
from legato.layers.step import Step
from legato.models.host import CALIBRATION_TOKENS, HostDecoder
from legato.models.registry import CausalModel
from legato.server.nodes.collectives import bytes_of
from legato.server.pending import SampledTokens
from legato.server.rows import Rows, RowStep

logger = logging.getLogger(__name__)
# For `benchmarks/pipeline.py`: times of the clock that all processes of a machine share.
COMPUTED = "Stage computed a step"


class PipelineStage:
    def __init__(
        self,
        shard: Shard,
        before: TensorLink,
        behind: TensorLink,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        on_lost: Callable[[str], None],
    ) -> None:
        """`before` is the link that this stage receives from, `behind` the one that it sends to."""
        self.is_first, self.is_last = shard.stage == 0, shard.stage == shard.num_stages - 1
        self._shard = shard
        self._before = before
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        # Rows whose tokens are on their way back to the first stage, step by step.
        self._expected: deque[list[int]] = deque()
        self._pretends = False
        self._began = 0  # when the step that is computed had its states, in nanoseconds
        self._sender = _Sender(behind, on_lost)

    @property
    def _num_columns(self) -> int:
        """That each shard sends: all of them where they cannot be divided."""
        size = self._shard.world_size
        return self._hidden_size if self._hidden_size % size else self._hidden_size // size

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """Warm-up runs steps that the other stages do not: nothing is sent, and what is received is zero."""
        self._pretends = True
        try:
            yield
        finally:
            self._pretends = False

    def calibrate(self, model: CausalModel) -> None:
        """Packed weights on a CPU: the stages see the calibration tokens one after the other, as the layers of one
        process do, so that they round the same inputs twice. States of zero say that a stage before has none."""
        self._began = time.monotonic_ns()
        states = None if self.is_first else self._receive(CALIBRATION_TOKENS)
        if isinstance(model, HostDecoder) and (states is None or states.any()):
            states = model.calibrate(states)
        else:
            states = torch.zeros(CALIBRATION_TOKENS, self._hidden_size, dtype=self._dtype)
        if not self.is_last:
            self.leave(states, [])

    def take_tokens(self, rows: Rows, parts: list[RowStep]) -> None:
        """On the first stage, before a step: the tokens that it begins with, and those that are here anyway."""
        if not self.is_first or self._pretends:
            return
        needed = {part.row for part in parts if part.decode}
        found = (place for place, sampled in enumerate(self._expected, 1) if needed.intersection(sampled))
        num_needed = max(found, default=0)
        while num_needed > 0 or (self._expected and self._before.has_arrived()):
            sampled = self._expected.popleft()
            data = self._before.receive(8 * len(sampled))
            there = torch.tensor(sampled, device=self._device)
            rows.last_tokens[there] = torch.frombuffer(data, dtype=torch.int64).to(self._device)
            num_needed -= 1

    def enter(self, step: Step) -> Step:
        """The step as this stage computes it: with the states from the stage before, and for the next one those of all
        tokens."""
        if not self.is_last:
            step = replace(step, logits_indices=None)
        if not self.is_first:
            step = replace(step, hidden=self._receive(len(step.input_ids)))
        self._began = time.monotonic_ns()
        return step

    def leave(self, hidden: torch.Tensor, sampling: list[int]) -> None:
        """Hand the states on. `sampling` are the rows that the last stage samples, in its order."""
        if self._pretends:
            return
        if self.is_first and sampling:
            self._expected.append(sampling)
        columns, size = self._num_columns, self._shard.world_size
        if columns < self._hidden_size:
            first = columns * (self._shard.rank % size)
            hidden = hidden[:, first : first + columns]
        on_host, wait = _copied(hidden.contiguous())
        self._sender.put(on_host, wait, self._began)

    def return_tokens(self, chosen: SampledTokens, wait: Callable[[], object]) -> None:
        """From the last stage to the first. They are on the host after `wait`."""
        if self.is_last and not self._pretends and chosen.rows:
            self._sender.put(chosen.token_ids, wait, self._began)

    def _receive(self, num_tokens: int) -> torch.Tensor:
        if self._pretends:
            return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        columns = self._num_columns
        data = self._before.receive(num_tokens * columns * self._dtype.itemsize)
        states = torch.frombuffer(data, dtype=self._dtype).view(num_tokens, columns)
        if self._device.type != "cpu":
            states = states.pin_memory().to(self._device, non_blocking=True)
        return states if columns == self._hidden_size else self._shard.gather_columns(states)


class _Sender:
    """A thread that waits for the device and sends, so that the engine can launch the next step meanwhile."""

    def __init__(self, link: TensorLink, on_lost: Callable[[str], None]) -> None:
        self._link = link
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[tuple[torch.Tensor, Callable[[], object], int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stage-sender", daemon=True).start()

    def put(self, tensor: torch.Tensor, wait: Callable[[], object], began: int) -> None:
        """What a step that began at this time has computed: on the host, after `wait`."""
        self._outbox.put((tensor, wait, began))

    def _run(self) -> None:
        while True:
            tensor, wait, began = self._outbox.get()
            try:
                wait()
                logger.debug(COMPUTED, extra={"fields": {"began": began, "ended": time.monotonic_ns()}})
                self._link.send(bytes_of(tensor))
            except BrokenLink as error:
                self._on_lost(str(error))
                return


def _copied(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """On the host, and what to wait with before it is read."""
    if tensor.device.type == "cpu":
        return tensor, lambda: None
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return on_host, event.synchronize
