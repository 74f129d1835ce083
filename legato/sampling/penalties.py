"""Penalties on tokens that a row already contains.

Two tables over (row, token), each made when the first request needs it: whether a token occurred in the prompt or the
text so far, for the repetition penalty, and how often it was generated, for the frequency and presence penalties.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from legato.sampling.rows import on_device

Ids: TypeAlias = np.ndarray | list[int]


class TokenHistory:
    """A row's line of a table means something only while the row uses the penalty; `begin_*` starts it afresh."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._seen: Tensor | None = None  # [max_rows, V] bool
        self._counts: Tensor | None = None  # [max_rows, V] int32

    def begin_seen(self, row: int, token_ids: Ids) -> None:
        ids = self._ids(token_ids)
        if self._seen is None:
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._seen[row].zero_().index_fill_(0, ids, True)

    def begin_counts(self, row: int, generated_ids: Ids) -> None:
        ids = self._ids(generated_ids)
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._counts[row].zero_().scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def penalise_seen(self, scores: Tensor, rows: Tensor, penalty: Tensor) -> None:
        """CTRL's repetition penalty [m, 1]: scores [m, V] of tokens seen go down if the penalty is above 1."""
        assert self._seen is not None
        seen = self._seen.index_select(0, rows)
        # One of the two halves is 0; clamping is vectorised on CPUs, choosing by a condition is not.
        penalised = (scores.clamp(min=0) / penalty).add_(scores.clamp(max=0).mul_(penalty))
        torch.where(seen, penalised, scores, out=scores)

    def penalise_counts(self, scores: Tensor, rows: Tensor, frequency: Tensor, presence: Tensor) -> None:
        """OpenAI's two: one for every time a token was generated, one [m, 1] for its having been at all."""
        assert self._counts is not None
        counts = self._counts.index_select(0, rows)
        scores.sub_(frequency * counts).sub_(presence * counts.clamp_(max=1))

    def record_seen(self, rows: Tensor, token_ids: Tensor) -> None:
        assert self._seen is not None
        self._seen.view(-1).index_fill_(0, self._flat(rows, token_ids), True)

    def record_counts(self, rows: Tensor, token_ids: Tensor) -> None:
        assert self._counts is not None
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self._counts.view(-1).scatter_add_(0, self._flat(rows, token_ids), ones)

    def _flat(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        return rows * self._shape[1] + token_ids

    def _ids(self, token_ids: Ids) -> Tensor:
        """Checked here, as an index out of range is an error of the device, which no process survives."""
        ids = torch.from_numpy(np.array(token_ids, dtype=np.int64))
        if len(token_ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._shape[1]:
            raise ValueError(f"a token of the prompt is not in the vocabulary of {self._shape[1]} tokens")
        return on_device(ids, self._device)
