"""Progress of long operations: a progress bar on a terminal, otherwise a log line from time to time.

with progress("Downloading weights", total=269_060_552) as advance:
    advance(len(chunk))
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Log messages that the launcher recognizes and shows as progress.
LOADING_WEIGHTS = "Loading weights"  # with a field `percent`
WARMING_UP = "Warming up"
WARMED_UP = "Warm-up done"
# The router's address. The launcher logs its own line instead, once /health answers.
LISTENING = "Listening"

# A line is logged when progress has grown by STEP, at most every MIN_SECONDS and at least every MAX_SECONDS.
STEP = 0.1
MIN_SECONDS = 2.0
MAX_SECONDS = 30.0
# From here on a line says how long the rest takes.
LONG_SECONDS = 120.0


@contextmanager
def progress(what: str, total: int, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done. Yields a function, callable from any thread, that takes the increment."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(what, total, unit) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    # Imported only for a terminal: it takes a while.
    from rich import progress as rich
    from rich.console import Console

    amount = [rich.DownloadColumn(), rich.TransferSpeedColumn()] if unit == "bytes" else [rich.MofNCompleteColumn()]
    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=total)
        yield lambda amount: bars.advance(task, amount)


@contextmanager
def _lines(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    start = told = time.monotonic()
    done = done_told = 0
    lock = threading.Lock()

    def advance(amount: int) -> None:
        nonlocal told, done, done_told
        with lock:
            done += amount
            now = time.monotonic()
            if now - told < (MIN_SECONDS if done - done_told >= STEP * total else MAX_SECONDS):
                return
            told, done_told = now, done
        share = f"{min(done / total, 1):.0%} of " if total else ""
        left = (now - start) * (total - done) / done if total and done else 0.0
        rest = f", {left / 60:.0f} minutes left" if left >= LONG_SECONDS else ""
        logger.info("%s: %s%s%s", what, share, _amount(total or done, unit), rest)

    yield advance
    logger.info("%s: done, %s in %.1f s", what, _amount(done, unit), time.monotonic() - start)


def _amount(number: int, unit: str) -> str:
    if unit != "bytes":
        return f"{number:,} {unit}"
    value = float(number)
    for name in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {name}"
        value /= 1000
    return f"{value:.1f} GB"
