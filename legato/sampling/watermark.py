"""The watermark of Kirchenbauer et al. (arXiv 2301.10226): after each token, a part of the vocabulary gets a bias.

Which half is a function of the previous token, so that who knows the function can count how many tokens of a text are
"green". Detectors exist for TGI's function, hence ours is the same to the bit: a CPU generator seeded with the
previous token times a prime, and torch's permutation of the vocabulary, of which the first part is green.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

_HASH_KEY = 15485863
# Masks of one byte per token: at a vocabulary of 128k, 16 MiB in all.
_MASKS_KEPT = 128


class GreenLists:
    """Green masks by previous token. A mask takes a permutation on the host, so the recent ones are kept."""

    def __init__(self, vocab_size: int, device: torch.device, gamma: float, delta: float) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_green = int(vocab_size * gamma)
        self._delta = delta
        self._generator = torch.Generator(device="cpu")
        self._masks: OrderedDict[int, Tensor] = OrderedDict()

    def favour(self, scores: Tensor, previous: list[int]) -> None:
        """Adds delta to the green tokens of each row of scores [m, V], in place."""
        scores.add_(torch.stack([self.mask(token) for token in previous]), alpha=self._delta)

    def mask(self, previous: int) -> Tensor:
        """[V] bool, True for the tokens that are green after `previous`."""
        mask = self._masks.get(previous)
        if mask is None:
            self._generator.manual_seed(_HASH_KEY * previous)
            green = torch.randperm(self._vocab_size, generator=self._generator)[: self._num_green]
            mask = torch.zeros(self._vocab_size, dtype=torch.bool).index_fill_(0, green, True).to(self._device)
            self._masks[previous] = mask
            if len(self._masks) > _MASKS_KEPT:
                self._masks.popitem(last=False)
        else:
            self._masks.move_to_end(previous)
        return mask
