"""What a benchmark shows while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from legato.benchmark import display as module
from legato.benchmark.display import Display, display


def test_without_a_terminal_there_are_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with display() as shown:
        shown.update("16 at once", 0.5, lambda: "too soon")
        monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
        shown.update("16 at once", 0.5, lambda: "half of it")
        shown.line("done")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "16 at once: half of it\ndone\n")


def test_on_a_terminal_there_is_a_bar_with_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REDRAW_SECONDS", 0.0)
    out = io.StringIO()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=Console(file=out, force_terminal=True, width=100), auto_refresh=False) as bars:
        shown = Display(bars, is_live=True)
        shown.update("16 at once", 0.5, lambda: "half of it")
        shown.line("that stays")
    assert "16 at once" in out.getvalue() and "half of it" in out.getvalue() and "that stays" in out.getvalue()
