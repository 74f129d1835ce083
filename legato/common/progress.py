"""Progress of long work: a bar on a terminal, a log line now and then anywhere else.

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

# A line tells something new: a tenth more, but not sooner than LEAST seconds. Silence never lasts longer than MOST.
STEP = 0.1
LEAST = 2.0
MOST = 30.0


@contextmanager
def progress(what: str, total: int, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done. The function that is yielded takes what was added; any thread may call it."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(what, total, unit) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    # Only terminals pay for the import.
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
            if now - told < (LEAST if done - done_told >= STEP * total else MOST):
                return
            told, done_told = now, done
        share = f"{min(done / total, 1):.0%} of " if total else ""
        logger.info("%s: %s%s", what, share, _amount(total or done, unit))

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
