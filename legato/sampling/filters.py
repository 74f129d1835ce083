"""Filters of the sampled tokens: top_k, top_p, typical_p, min_p.

Each takes weights [m, V] (probabilities; their sum is less than 1 once some are out, that is, 0) and sets more of them
to 0 in place, never all of them. Their meanings are those of the warpers of the same names in transformers, except for
ties: tokens exactly as likely as the last one kept are kept too, where a sort would keep those that it happened to put
first. So no result depends on a sorting algorithm.

top_p and typical_p ask how far down an order of the tokens one must go to gather a given mass. Sorting the vocabulary
answers that, slowly: it orders all 49,000 tokens. `_reach` finds the same place with
three histograms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Probabilities as integers: sums are exact, so nothing depends on the order in which a device adds them.
_UNITS = 2.0**60
# The 31 bits of a key, as (bits below the digit, values of the digit), from the top.
_DIGITS = ((20, 1 << 11), (10, 1 << 10), (0, 1 << 10))
_SIGNLESS = 0x7FFFFFFF


def top_k(scores: Tensor, weights: Tensor, k: Tensor, max_k: int) -> None:
    """Keeps the k [m, 1] highest scores. By scores, since weights may be equal where scores differ by a hair."""
    max_k = min(max_k, scores.shape[1])
    highest = scores.topk(max_k, dim=-1).values
    _keep(weights, torch.ge, scores, highest.gather(1, k.clamp(max=max_k) - 1))


def top_p(weights: Tensor, p: Tensor) -> None:
    """Keeps the fewest tokens, likeliest first, that together have the share p [m, 1] of the mass."""
    units = _in_units(weights)
    total = units.sum(-1, keepdim=True)
    # From the other end: the least likely tokens go as long as they have no more than 1 - p among them.
    target = ((1.0 - p.double()) * total).long() + 1
    _keep(weights, torch.ge, weights, _reach(weights, units, torch.minimum(target, total)))


def typical_p(scores: Tensor, weights: Tensor, p: Tensor) -> None:
    """Keeps the fewest tokens with the share p [m, 1], those first whose surprise is nearest to the expected one.

    Surprise is -log(probability) and entropy its mean. Both contain the same log(sum), so their distance is that of
    a score from the mean score.
    """
    mean = (weights * scores).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    distance = (scores - mean).abs_()
    units = _in_units(weights)
    target = (p.double() * units.sum(-1, keepdim=True)).ceil_().long().clamp_(min=1)
    _keep(weights, torch.le, distance, _reach(distance, units, target))


def min_p(weights: Tensor, p: Tensor) -> None:
    """Keeps tokens at least p [m, 1] times as likely as the likeliest."""
    _keep(weights, torch.ge, weights, weights.amax(-1, keepdim=True).mul_(p))


def _keep(weights: Tensor, compare: Callable[..., Tensor], keys: Tensor, bound: Tensor) -> None:
    # A comparison into float32 is vectorised on CPUs, one into bool is six times slower.
    weights.mul_(compare(keys, bound, out=torch.empty_like(keys)))


def _in_units(weights: Tensor) -> Tensor:
    return (weights * _UNITS).long()


def _reach(keys: Tensor, units: Tensor, target: Tensor) -> Tensor:
    """The lowest key [m, 1] such that tokens with keys up to it have `target` [m, 1] units or more.

    keys [m, V] float32, not negative: such numbers are ordered like their bits. They are looked at as numbers of
    three digits. A histogram of the first digit tells which one the key sought begins with; then a histogram of the
    second digit of those that begin so, and of the third. Keys below fall into an extra first bin and keys above into
    an extra last one, so that the sums begin where they should.
    """
    bits = keys.view(torch.int32) & _SIGNLESS  # a NaN may carry a sign, and must not become a negative bin
    found = torch.zeros(keys.shape[0], 1, dtype=torch.int32, device=keys.device)
    digits, places = torch.empty_like(bits), torch.empty_like(units)
    for below, size in _DIGITS:
        torch.sub(bits, found, out=digits).bitwise_right_shift_(below).clamp_(-1, size).add_(1)
        bins = torch.zeros(keys.shape[0], size + 2, dtype=torch.int64, device=keys.device)
        bins.scatter_add_(1, places.copy_(digits), units)
        digit = torch.searchsorted(bins.cumsum(-1), target).clamp_(1, size) - 1
        found += digit.int() << below
    return found.view(torch.float32)
