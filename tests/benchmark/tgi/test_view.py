"""What a person sees while the benchmark runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.live import Live

from legato.benchmark.tgi.unary import Measured
from legato.benchmark.tgi.view import Lines, Screen, describe, sparkline, watching


def measured() -> Measured:
    result = Measured(4, sequence_length=10)
    result.add(0.020, [0.005, 0.005])
    result.add(0.040, [0.010, 0.010])
    return result


def test_a_sparkline_reaches_from_the_lowest_value_to_the_highest() -> None:
    assert sparkline([1, 8, 4.5]) == "▁█▅"


def test_a_sparkline_of_equal_values_is_flat() -> None:
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_a_batch_size_in_one_line() -> None:
    assert describe(measured()) == (
        "batch size 4: prefill 30.00 ms, 1,500 tokens/s, decode 7.50 ms a token, 600 tokens/s"
    )


def test_a_line_comes_when_the_last_run_of_a_batch_size_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(runs_per_size=2)
    lines.begin(measured())
    lines.advance()
    assert capsys.readouterr().err == ""
    lines.advance()
    assert capsys.readouterr().err.startswith("batch size 4")


def test_the_screen_shows_progress_figures_and_the_spread() -> None:
    out = io.StringIO()
    with Live(console=Console(file=out, force_terminal=True, width=120), auto_refresh=False) as live:
        screen = Screen(live, num_sizes=2, runs_per_size=2)
        screen.begin(measured())
        screen.advance()
    text = out.getvalue()
    assert "1/4" in text and "1/2" in text
    assert "30.00" in text and "7.50" in text
    assert "Prefill, ms" in text and "█" in text


def test_without_a_terminal_there_are_lines() -> None:
    with watching(True, 1, 1) as observer:
        assert isinstance(observer, Lines)
