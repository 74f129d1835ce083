"""Summaries and tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.benchmark.report import Summary, markdown, percentile, write_json

MEASUREMENTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(MEASUREMENTS, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_a_summary_does_not_depend_on_the_order() -> None:
    assert Summary.of([3.0, 1.0, 2.0]) == Summary(
        2.0, 1.0, 3.0, 2.0, pytest.approx(2.8), pytest.approx(2.9), pytest.approx(2.98)
    )


def test_nothing_measured_has_no_summary() -> None:
    assert Summary.of([]) is None


def test_markdown_columns_line_up() -> None:
    lines = markdown(("Name", "N"), [("a", "1"), ("longer", "100")]).splitlines()
    assert lines == ["| Name   |   N |", "| ------ | --: |", "| a      |   1 |", "| longer | 100 |"]


def test_results_have_no_paths_of_the_machine(tmp_path: Path) -> None:
    write_json(str(tmp_path / "out.json"), {"here": f"{Path.cwd()}/model", "home": f"{Path.home()}/.cache"})
    assert json.loads((tmp_path / "out.json").read_text()) == {"here": "model", "home": "~/.cache"}
