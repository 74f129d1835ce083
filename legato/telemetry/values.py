"""The numbers of one metric, in the text format of Prometheus. For one thread: nothing is locked.

All label values are known in advance, so that no client can add a series, and every series is there from the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Protocol

Labels = tuple[str, ...]


class Value(Protocol):
    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        """Each sample as it is written, and its number."""
        ...


class Counter:
    def __init__(self, labels: dict[str, Sequence[str]]) -> None:
        self._names = list(labels)
        self._values: dict[Labels, float] = dict.fromkeys(product(*labels.values()), 0.0)

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self._values[labels] += by

    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        for labels, value in self._values.items():
            yield name + label_text(zip(self._names, labels, strict=True)), value


class Gauge:
    """A gauge whose value is read when metrics are rendered."""

    def __init__(self) -> None:
        self._read: Callable[[], float] = float
        self._labels: Callable[[], dict[str, str]] = dict

    def watch(self, read: Callable[[], float], labels: Callable[[], dict[str, str]] = dict) -> None:
        self._read, self._labels = read, labels

    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        yield name + label_text(self._labels().items()), float(self._read())


class Histogram:
    def __init__(self, labels: dict[str, Sequence[str]], bounds: Sequence[float]) -> None:
        self._names = list(labels)
        self._bounds = list(bounds)
        # For each combination of labels: the sum, and how many values were in each bucket alone.
        self._sums: dict[Labels, float] = dict.fromkeys(product(*labels.values()), 0.0)
        self._counts = {labels: [0] * (len(self._bounds) + 1) for labels in self._sums}

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        self._sums[labels] += value * times
        self._counts[labels][bisect_left(self._bounds, value)] += times

    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        for labels, total in self._sums.items():
            pairs = list(zip(self._names, labels, strict=True))
            sums = list(accumulate(self._counts[labels]))
            for bound, count in zip((*map(repr, self._bounds), "+Inf"), sums, strict=True):
                yield f"{name}_bucket{label_text([*pairs, ('le', bound)])}", float(count)
            yield f"{name}_count{label_text(pairs)}", float(sums[-1])
            yield f"{name}_sum{label_text(pairs)}", total


def label_text(labels: Iterable[tuple[str, str]]) -> str:
    words = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{words}}}" if words else ""
