"""The arithmetic of a benchmark: what many measurements come down to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Many measurements in six numbers, in the unit they were measured in."""

    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """None where nothing was measured: a generation of one token has no decode."""
        if not values:
            return None
        ordered = sorted(values)
        ranks = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(math.fsum(ordered) / len(ordered), ordered[0], ordered[-1], *ranks)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of sorted values lie, on the straight line between its two neighbours."""
    assert ordered, "a percentile of nothing"
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class Bin:
    low: float
    high: float
    count: int


def histogram(values: Sequence[float], num_bins: int) -> list[Bin]:
    """Bins of equal width from the lowest value to the highest. Equal values share one bin of no width."""
    if not values:
        return []
    low, high = min(values), max(values)
    width = (high - low) / num_bins
    if width == 0:
        return [Bin(low, high, len(values))]
    counts = [0] * num_bins
    for value in values:
        counts[min(int((value - low) / width), num_bins - 1)] += 1
    return [Bin(low + i * width, low + (i + 1) * width, count) for i, count in enumerate(counts)]
