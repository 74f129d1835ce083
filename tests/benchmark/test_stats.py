"""The arithmetic of a benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.benchmark.stats import Bin, Summary, histogram, percentile

MEASUREMENTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(MEASUREMENTS, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_a_summary_does_not_depend_on_the_order() -> None:
    assert Summary.of([3.0, 1.0, 2.0]) == Summary(2.0, 1.0, 3.0, 2.0, pytest.approx(2.8), pytest.approx(2.98))


def test_nothing_measured_has_no_summary() -> None:
    assert Summary.of([]) is None


@given(MEASUREMENTS, st.integers(1, 12))
def test_every_value_is_in_one_bin(values: list[float], num_bins: int) -> None:
    bins = histogram(values, num_bins)
    assert sum(item.count for item in bins) == len(values)
    assert bins[0].low == min(values)
    assert bins[-1].high == pytest.approx(max(values))


def test_values_are_counted_where_they_belong() -> None:
    assert histogram([0.0, 1.0, 1.5, 4.0], 2) == [Bin(0.0, 2.0, 3), Bin(2.0, 4.0, 1)]


def test_equal_values_share_a_bin() -> None:
    assert histogram([2.0, 2.0], 8) == [Bin(2.0, 2.0, 2)]
