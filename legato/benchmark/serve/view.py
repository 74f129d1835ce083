"""What a person sees while the load runs: a live screen on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from legato.benchmark.serve.load import Counts
from legato.benchmark.stats import percentile

LINE_SECONDS = 5.0
SCREEN_SECONDS = 0.25
BAR_WIDTH = 40

Watch = Callable[[Counts], None]


@contextmanager
def watching(tui: bool) -> Iterator[Watch]:
    console = Console(stderr=True)
    if not tui or not console.is_terminal:
        yield Lines()
        return
    # Drawn when there is news, and not by a thread: it would take the time of the processes that make the load.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Screen(live)


class Lines:
    """A line now and then."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, counts: Counts) -> None:
        if time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            print(f"{counts.level.name}: {', '.join(_words(counts))}", file=sys.stderr, flush=True)


class Screen:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._drawn = 0.0

    def __call__(self, counts: Counts) -> None:
        if time.monotonic() - self._drawn >= SCREEN_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(_screen(counts), refresh=True)


def progress_of(counts: Counts) -> float:
    """The share that is done: of the requests or of the time, whichever ends sooner."""
    level = counts.level
    shares = [len(counts.records) / level.num_requests] if level.num_requests else []
    shares += [counts.seconds / level.duration] if level.duration else []
    return min(1.0, max(shares, default=0.0))


def _screen(counts: Counts) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(counts.level.name, ProgressBar(total=1.0, completed=progress_of(counts), width=BAR_WIDTH))
    return Group(head, Text(" · ".join(_words(counts)), style="cyan"))


def _words(counts: Counts) -> list[str]:
    num_failed = sum(record.error is not None for record in counts.records)
    words = [f"{counts.seconds:.0f} s", f"{len(counts.records)} done", f"{sum(counts.num_open.values())} out"]
    if counts.seconds:
        words.append(f"{sum(counts.num_tokens.values()) / counts.seconds:,.0f} tokens/s")
    first_tokens = sorted(record.ttft * 1e3 for record in counts.records if record.ttft is not None)
    if first_tokens:
        words.append(f"first token after {percentile(first_tokens, 50):,.0f} ms (p50)")
    if num_failed:
        words.append(f"{num_failed} failed")
    return words
