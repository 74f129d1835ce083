"""Progress of the shards while they start: a progress bar each on a terminal, otherwise a log line per 20 %.

Children report progress as log records. Both forms are temporary filters on the log handler.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from legato.common.progress import LOADING_WEIGHTS, WARMED_UP, WARMING_UP

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PERCENT_PER_LINE = 20


@contextmanager
def relayed(tell: Callable[[str, float], None], num_shards: int) -> Iterator[None]:
    """Tell of the stages of the start while the block runs. To be entered before `shown`, which drops records."""
    handler, relay = logging.getLogger().handlers[0], StageRelay(tell, num_shards)
    handler.addFilter(relay)
    try:
        yield
    finally:
        handler.removeFilter(relay)


@contextmanager
def shown(json_output: bool) -> Iterator[None]:
    """Show the progress of the shards. Enter this after they were started: progress bars are drawn by a thread, and no
    thread should run when a process forks."""
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    show = _progress_bars if sys.stderr.isatty() and not json_output else _progress_lines
    with show(handler) as view:
        handler.addFilter(view)
        try:
            yield
        finally:
            handler.removeFilter(view)


@contextmanager
def lines() -> Iterator[None]:
    """Progress as log lines, also on a terminal: other lines are expected in between."""
    handler, view = logging.getLogger().handlers[0], ProgressLines()
    handler.addFilter(view)
    try:
        yield
    finally:
        handler.removeFilter(view)


@contextmanager
def _progress_lines(handler: logging.StreamHandler[io.TextIOBase]) -> Iterator[logging.Filter]:
    yield ProgressLines()


@contextmanager
def _progress_bars(handler: logging.StreamHandler[io.TextIOBase]) -> Iterator[logging.Filter]:
    # Imported only for a terminal: it takes a while.
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = [rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn()]
    bars = rich.Progress(*columns, rich.TimeElapsedColumn(), console=console, transient=True)
    stream = handler.stream
    if stream.isatty():
        handler.setStream(_AboveBars(console))
    try:
        with bars:
            yield ProgressBars(bars)
    finally:
        handler.setStream(stream)


class ProgressLines(logging.Filter):
    """Passes one loading record per 20 %, and all other records."""

    def __init__(self) -> None:
        super().__init__()
        # The last step shown, by program.
        self._shown: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        percent = _percent(record)
        if percent is None:
            return True
        program, step = _program(record), percent // PERCENT_PER_LINE
        if step <= self._shown.get(program, 0):
            return False
        self._shown[program] = step
        return True


class ProgressBars(logging.Filter):
    """Draws loading and warm-up of each shard as a progress bar, and passes all other records."""

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
        if record.msg == WARMING_UP:
            self._end(program)
            self._begin(program, "warming up", total=None)
            return False
        if record.msg == WARMED_UP:
            self._end(program)
        return True

    def _begin(self, program: str, what: str, total: int | None) -> None:
        self._tasks[program] = self._bars.add_task(f"{program} {what}", total=total)

    def _end(self, program: str) -> None:
        if (task := self._tasks.pop(program, None)) is not None:
            self._bars.remove_task(task)


class StageRelay(logging.Filter):
    """Tells `tell` how far the slowest shard is, and passes all records."""

    def __init__(self, tell: Callable[[str, float], None], num_shards: int) -> None:
        super().__init__()
        self._tell = tell
        self._num_shards = num_shards
        self._percents: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        percent = _percent(record)
        if percent is not None:
            self._percents[_program(record)] = percent
            slowest = min(self._percents.values()) if len(self._percents) == self._num_shards else 0
            self._tell(LOADING_WEIGHTS, slowest / 100)
        elif record.msg == WARMING_UP:
            self._tell(WARMING_UP, 0.0)
        return True


class _AboveBars(io.TextIOBase):
    """Stream for log lines while progress bars are shown: prints above them, without wrapping."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.out(text.removesuffix("\n"), highlight=False)
        return len(text)


def _program(record: logging.LogRecord) -> str:
    return str(getattr(record, "program", ""))


def _percent(record: logging.LogRecord) -> int | None:
    """The percentage, if this is a loading record."""
    percent = getattr(record, "fields", {}).get("percent")
    return percent if record.msg == LOADING_WEIGHTS and isinstance(percent, int) else None
