"""Draft models and EAGLE-3 heads: they propose tokens and have their own keys and values."""

from __future__ import annotations

from typing import Protocol

import torch

from legato.layers.kv_cache import KVCache, KVShape
from legato.layers.step import Step
from legato.models.decoder import Decoder, StateTap
from legato.models.eagle import Eagle3Head
from legato.models.registry import CausalModel, LimitedModel


class Guesser(Protocol):
    """Called by `DraftModel`. At position p it reads token p + `shift`."""

    kv_shape: KVShape
    max_positions: int
    vocab_size: int
    shift: int

    @property
    def bytes_per_token(self) -> int:
        """What it keeps of each token in the KV cache's slots."""
        ...

    def attach(self, num_slots: int) -> None:
        """From now on the base model computes with a cache of so many slots."""
        ...

    def limit(self, longest: int) -> None:
        """No sequence will have more tokens."""
        ...

    def compute(self, step: Step, cache: KVCache, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """States and logits of the wanted tokens. `states` are those of the call before, if its tokens were guesses."""
        ...


class SmallModel:
    """It needs nothing of the base model but its tokens."""

    shift = 0

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.kv_shape, self.max_positions = model.kv_shape, model.config.max_positions
        self.vocab_size = model.config.vocab_size

    @property
    def bytes_per_token(self) -> int:
        return self.kv_shape.bytes_per_token

    def attach(self, num_slots: int) -> None:
        pass

    def limit(self, longest: int) -> None:
        if isinstance(self.model, LimitedModel):
            self.model.limit(longest)

    def compute(self, step: Step, cache: KVCache, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.model.forward(step, cache)
        return hidden, self.model.logits(hidden)


class EagleGuesser:
    """It reads states of the base model, which are kept by slot: blocks of a cached prefix have theirs. The last
    position of a block was read with the token behind it, which another request with this prefix need not have: one
    guess may be worse for it."""

    shift = 1

    def __init__(self, head: Eagle3Head, base: Decoder) -> None:
        self._head, self._base = head, base
        self.kv_shape, self.max_positions = head.kv_shape, head.config.max_positions
        self.vocab_size = head.vocab_size
        self._states = torch.zeros(0)

    @property
    def bytes_per_token(self) -> int:
        size, dtype = self._head.state_shape
        return self.kv_shape.bytes_per_token + size * dtype.itemsize

    def attach(self, num_slots: int) -> None:
        size, dtype = self._head.state_shape
        self._states = torch.zeros(num_slots, size, dtype=dtype, device=self._head.device)
        self._base.tap = StateTap(self._head.tapped, self._keep)

    def _keep(self, states: list[torch.Tensor], slots: torch.Tensor) -> None:
        self._states[slots] = self._head.fuse(states)

    def limit(self, longest: int) -> None:
        self._head.limit(longest)

    def compute(self, step: Step, cache: KVCache, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._head.forward(step, self._states[step.slots] if states is None else states, cache)
        return found, self._head.logits(found)
