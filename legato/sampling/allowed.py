"""The tokens that a grammar allows, one bit per token, packed by the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Taken off what is forbidden: that is then below every score that penalties can make of a broken logit, and still a
# number after every temperature (infinity times a weight of zero would not be one).
_FORBIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class Allowed:
    """For the m rows of a batch that are restricted. The others may choose from everything."""

    places: list[int]  # [m], ascending: where they stand in the batch
    bits: Tensor  # [m, words] int32 on the host, lowest bit first; at least one token of each row is allowed

    def restrict(self, scores: Tensor) -> None:
        """Puts the scores [n, V] of tokens that are not allowed below all others, in place."""
        forbidden = _forbidden(self.bits, scores.shape[1], scores.device)
        if len(self.places) == len(scores):
            scores.add_(forbidden, alpha=_FORBIDDEN)
        else:
            places = torch.tensor(self.places).to(scores.device, non_blocking=True)
            scores.index_add_(0, places, forbidden, alpha=_FORBIDDEN)


def _forbidden(bits: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """bits [m, words] -> [m, V] float32, 1 where the bit is 0. Floats, because adding them is vectorised on a CPU."""
    assert bits.shape[1] * 32 >= vocab_size, f"{bits.shape[1]} words for {vocab_size} tokens"
    if device.type != "cpu":  # pinned, because a copy from other memory would wait for the forward pass
        return forbidden_by_shifting(bits.pin_memory().to(device, non_blocking=True), vocab_size)
    flags = np.unpackbits((~bits).numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(flags).float()


def forbidden_by_shifting(bits: Tensor, vocab_size: int) -> Tensor:
    flags = ~bits.unsqueeze(-1) >> _shifts(bits.device) & 1
    return flags.view(len(bits), -1)[:, :vocab_size].float()


@lru_cache(maxsize=8)
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(32, dtype=torch.int32, device=device)
