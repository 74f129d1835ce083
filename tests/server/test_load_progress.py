"""How often loading is mentioned."""

from __future__ import annotations

import pytest

from legato.common.progress import LOADING_WEIGHTS
from legato.server.loading import FINE_STEP, STEP, LoadProgress


def percents(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [vars(record)["fields"]["percent"] for record in caplog.records if record.msg == LOADING_WEIGHTS]


def test_people_get_five_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = LoadProgress(STEP)
    for done in range(1, 1001):
        progress(done, 1000)
    assert percents(caplog) == [20, 40, 60, 80, 100]


def test_programs_get_enough_for_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = LoadProgress(FINE_STEP)
    for done in range(1, 1001):
        progress(done, 1000)
    assert percents(caplog) == list(range(2, 101, 2))


def test_a_tensor_that_skips_steps_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = LoadProgress(STEP)
    for done in (1, 75, 76, 100):
        progress(done, 100)
    assert percents(caplog) == [75, 100]


def test_a_model_without_bytes_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    LoadProgress(STEP)(0, 0)
    assert percents(caplog) == []
