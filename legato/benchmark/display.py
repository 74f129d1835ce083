"""Progress of a benchmark on stderr: a bar on a terminal, plain lines elsewhere. stdout holds the tables alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

REDRAW_SECONDS = 0.25
LINE_SECONDS = 5.0


class Display:
    def __init__(self, bars: Progress, is_live: bool) -> None:
        self._bars = bars
        self._is_live = is_live
        self._task = bars.add_task("", total=1.0, status="")
        self._shown = time.monotonic()

    def update(self, name: str, share: float, status: Callable[[], str]) -> None:
        """How much is done. Redraws the bar, or prints a line every few seconds where there is no terminal; only then
        the status is asked for."""
        if time.monotonic() - self._shown < (REDRAW_SECONDS if self._is_live else LINE_SECONDS):
            return
        self._shown = time.monotonic()
        if self._is_live:
            self._bars.update(self._task, description=name, completed=share, status=status(), refresh=True)
        else:
            self.line(f"{name}: {status()}")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._is_live:
            self._bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def display(tui: bool = True) -> Iterator[Display]:
    console = Console(stderr=True)
    is_live = tui and console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}", style="cyan"))
    # Redrawn by update() and not by a thread, which would take time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not is_live) as bars:
        yield Display(bars, is_live)
