"""Which tokens a batch may choose from at all, where a grammar has a say: one bit per token, packed by the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Below every score that penalties can make of a broken logit, and still a number after every temperature: infinity
# times a weight of zero would not be one.
_FORBIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class Allowed:
    """For the m rows of a batch that are restricted. The others may choose from everything."""

    places: list[int]  # [m], ascending: where they stand in the batch
    bits: Tensor  # [m, words] int32 on the host, lowest bit first; at least one token of each row is allowed

    def restrict(self, scores: Tensor) -> None:
        """Puts the scores [n, V] of tokens that are not allowed below all others, in place."""
        forbidden = _unset(self.bits, scores.shape[1], scores.device)
        if len(self.places) == len(scores):
            scores.masked_fill_(forbidden, _FORBIDDEN)
            return
        places = torch.tensor(self.places).to(scores.device, non_blocking=True)
        lines = scores.index_select(0, places).masked_fill_(forbidden, _FORBIDDEN)
        scores.index_copy_(0, places, lines)


def _unset(bits: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """bits [m, words] -> [m, V] bool, True where the bit is 0."""
    assert bits.shape[1] * 32 >= vocab_size, f"{bits.shape[1]} words for {vocab_size} tokens"
    if device.type == "cpu":  # numpy unpacks at memory speed; shifting as below takes ten times as long
        flags = np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(np.bitwise_xor(flags, 1, out=flags)).view(torch.bool)
    words = bits.to(device, non_blocking=True).unsqueeze(-1)
    return (words >> _shifts(device) & 1).view(len(bits), -1)[:, :vocab_size] == 0


@lru_cache(maxsize=8)
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(32, dtype=torch.int32, device=device)
