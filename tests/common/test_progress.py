"""Progress without a terminal: few lines, and a last one."""

from __future__ import annotations

import logging

import pytest

from legato.common import progress as module
from legato.common.progress import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[float]:
    """A clock that the test moves."""
    caplog.set_level(logging.INFO, logger="legato.common.progress")
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_quick_work_is_one_line(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with progress("Loading", 1000) as advance:
        for _ in range(100):
            clock[0] += 0.01
            advance(10)
    assert caplog.messages == ["Loading: done, 1 kB in 1.0 s"]


def test_slow_work_logs_every_tenth(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with progress("Downloading", 10_000_000) as advance:
        for _ in range(1000):
            clock[0] += 0.1
            advance(10_000)
    assert caplog.messages[:2] == ["Downloading: 10% of 10 MB", "Downloading: 20% of 10 MB"]
    assert len(caplog.messages) == 11


def test_long_work_says_how_much_is_left(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with progress("Quantizing", 10, "layers") as advance:
        for _ in range(10):
            clock[0] += 60
            advance(1)
    assert caplog.messages[:2] == [
        "Quantizing: 10% of 10 layers, 9 minutes left",
        "Quantizing: 20% of 10 layers, 8 minutes left",
    ]
    assert caplog.messages[8] == "Quantizing: 90% of 10 layers"


def test_a_line_is_logged_at_least_every_max_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with progress("Downloading", 10_000_000_000) as advance:
        for _ in range(100):
            clock[0] += 1
            advance(1000)
    assert len(caplog.messages) == 4


def test_failed_work_is_not_logged_as_done(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError), progress("Downloading", 10):
        raise OSError
    assert caplog.messages == []


def test_other_units_are_counted(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with progress("Loading", 2000, unit="tensors") as advance:
        advance(2000)
    assert caplog.messages == ["Loading: done, 2,000 tensors in 0.0 s"]


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True)
    with progress("Downloading", 10) as advance:
        advance(10)
    assert "Downloading" in capsys.readouterr().err
