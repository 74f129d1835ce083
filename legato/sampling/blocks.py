"""A row of the vocabulary, cut into blocks: look at one number per block first, then into one block.

Searching 50,000 numbers one after another is what makes `argmax` and `cumsum` slow on a CPU; summing or maximising
them in blocks is done with vector instructions. With about sqrt(V) blocks the two searches that remain are tiny.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

# Masses become whole numbers with about this sum. In float64 such sums are exact, hence the same on every device and in
# every batch, and no rounding error can point at a mass of nothing.
_RESOLUTION = 2.0**52


@lru_cache(maxsize=64)
def num_blocks(vocab_size: int) -> int:
    """The largest divisor up to sqrt(V), so that blocks are a view. 1 for a prime: correct, only slower."""
    return next(d for d in range(isqrt(vocab_size), 0, -1) if vocab_size % d == 0)


def argmax(scores: Tensor) -> Tensor:
    """scores [n, V] without NaN -> [n]; of equal ones the lowest id, as the first block is taken, then its first."""
    if scores.is_cuda:  # one kernel, and vectorised there
        return scores.argmax(-1)
    blocks = _cut(scores)
    block = blocks.amax(-1).argmax(-1)
    return block * blocks.shape[2] + _inside(blocks, block).argmax(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """weights [n, V] float32, not negative, of any sum; u [n] in [0, 1) -> [n], in vocabulary order.

    Token i is chosen for u in [sum(w[:i]), sum(w[:i+1])) / sum(w): never one of weight zero.
    """
    blocks = _cut(weights)
    units = _in_units(blocks.sum(-1))
    cumulated = units.cumsum(-1)
    block, point = _find(cumulated, u.unsqueeze(1))
    own = units.gather(1, block)
    u_inside = (point - cumulated.gather(1, block)).add_(own).div_(own)  # how far into the block the point lies
    block = block.squeeze(1)
    token, _ = _find(_in_units(_inside(blocks, block)).cumsum(-1), u_inside)
    return block * blocks.shape[2] + token.squeeze(1)


def _cut(x: Tensor) -> Tensor:
    n, vocab_size = x.shape
    blocks = num_blocks(vocab_size)
    return x.view(n, blocks, vocab_size // blocks)


def _inside(blocks: Tensor, block: Tensor) -> Tensor:
    """[n, blocks, size], [n] -> [n, size]: the chosen block of each row."""
    n, count, size = blocks.shape
    return blocks.view(n * count, size).index_select(0, _first_blocks(n, count, block.device) + block)


@lru_cache(maxsize=512)
def _first_blocks(n: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(0, n * count, count, device=device)


def _in_units(masses: Tensor) -> Tensor:
    """[n, m] -> float64. Scaled by their own sum, so that the largest has many units however small the sum is."""
    return masses.mul(_RESOLUTION).div_(masses.sum(-1, keepdim=True)).double().floor_()


def _find(cumulated: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """cumulated [n, m], u [n, 1] -> (index, point), both [n, 1]: the point u of the whole, and in which mass it lies.

    That mass is not zero: the point is less than the sum, as u is less than 1 and both are exact, and the first of
    the cumulated numbers that exceeds it does so by a mass of its own.
    """
    point = (cumulated[:, -1:] * u).floor_()
    index = torch.searchsorted(cumulated, point, right=True)
    # The limit is for numbers that are no masses: whatever comes in, an index comes out.
    return index.clamp_(max=cumulated.shape[1] - 1), point
