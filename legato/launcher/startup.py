"""What the start of the shards looks like: a bar for each on a terminal, a line now and then anywhere else.

Children are heard as log records. Both forms are a filter on the handler that shows them, for as long as it lasts.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from legato.common.milestones import LOADING, WARM, WARMING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Percent between two lines.
STEP = 20


@contextmanager
def shown(json_output: bool) -> Iterator[None]:
    """Show how far the shards are. Enter it after they were started: bars are drawn by a thread, which must not be
    there when a process forks."""
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    show = _bars if sys.stderr.isatty() and not json_output else _lines
    with show(handler) as view:
        handler.addFilter(view)
        try:
            yield
        finally:
            handler.removeFilter(view)


@contextmanager
def _lines(handler: logging.StreamHandler[io.TextIOBase]) -> Iterator[logging.Filter]:
    yield Lines()


@contextmanager
def _bars(handler: logging.StreamHandler[io.TextIOBase]) -> Iterator[logging.Filter]:
    # Only terminals pay for the import.
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = [rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn()]
    bars = rich.Progress(*columns, rich.TimeElapsedColumn(), console=console, transient=True)
    stream = handler.stream
    if stream.isatty():
        handler.setStream(_Above(console))
    try:
        with bars:
            yield Bars(bars)
    finally:
        handler.setStream(stream)


class Lines(logging.Filter):
    """Lets through every fifth part of the loading, and everything else."""

    def __init__(self) -> None:
        super().__init__()
        # The last step that was shown, by program.
        self._shown: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        percent = _percent(record)
        if percent is None:
            return True
        program, step = _program(record), percent // STEP
        if step <= self._shown.get(program, 0):
            return False
        self._shown[program] = step
        return True


class Bars(logging.Filter):
    """One line per shard: first how much is loaded, then that it warms up. Lets through what it does not draw."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        program, percent = _program(record), _percent(record)
        if percent is not None:
            if program not in self._tasks:
                self._begin(program, "loading weights", total=100)
            self._bars.update(self._tasks[program], completed=percent)
            return False
        if record.msg == WARMING:
            self._end(program)
            self._begin(program, "warming up", total=None)
            return False
        if record.msg == WARM:
            self._end(program)
        return True

    def _begin(self, program: str, what: str, total: int | None) -> None:
        self._tasks[program] = self._bars.add_task(f"{program} {what}", total=total)

    def _end(self, program: str) -> None:
        if (task := self._tasks.pop(program, None)) is not None:
            self._bars.remove_task(task)


class _Above(io.TextIOBase):
    """Where log lines go while there are bars: above them, uncut. It is the same terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.out(text.removesuffix("\n"), highlight=False)
        return len(text)


def _program(record: logging.LogRecord) -> str:
    return str(getattr(record, "program", ""))


def _percent(record: logging.LogRecord) -> int | None:
    """How much a shard has loaded, if that is what the record is about."""
    percent = getattr(record, "fields", {}).get("percent")
    return percent if record.msg == LOADING and isinstance(percent, int) else None
