"""What a person sees while a benchmark runs: a live screen on a terminal, a line per batch size anywhere else.

Both write to stderr, so that stdout holds the tables alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from legato.benchmark.stats import histogram
from legato.benchmark.tgi.unary import Measured, Observer

BARS = "▁▂▃▄▅▆▇█"
NUM_BINS = 8
BAR_WIDTH = 24


@contextmanager
def watching(tui: bool, num_sizes: int, runs_per_size: int) -> Iterator[Observer]:
    console = Console(stderr=True)
    if not tui or not console.is_terminal:
        yield Lines(runs_per_size)
        return
    # Drawn between runs only: a screen that redraws itself would take the time of the calls that are measured.
    with Live(console=console, auto_refresh=False) as live:
        yield Screen(live, num_sizes, runs_per_size)


class Lines:
    """A line when a batch size is done."""

    def __init__(self, runs_per_size: int) -> None:
        self._runs_per_size = runs_per_size
        self._measured: Measured | None = None
        self._num_runs = 0

    def begin(self, measured: Measured) -> None:
        self._measured, self._num_runs = measured, 0

    def advance(self) -> None:
        self._num_runs += 1
        if self._measured is not None and self._num_runs == self._runs_per_size:
            print(describe(self._measured), file=sys.stderr, flush=True)


class Screen:
    """Progress, a row per batch size, and how the latencies of the current one are spread."""

    def __init__(self, live: Live, num_sizes: int, runs_per_size: int) -> None:
        self._live = live
        self._num_sizes = num_sizes
        self._runs_per_size = runs_per_size
        self._results: list[Measured] = []
        self._num_runs = 0

    def begin(self, measured: Measured) -> None:
        self._results.append(measured)
        self._num_runs = 0
        self._draw()

    def advance(self) -> None:
        self._num_runs += 1
        self._draw()

    def _draw(self) -> None:
        current = self._results[-1].latencies
        spread = Table.grid(padding=(0, 6))
        spread.add_row(*(_histogram(step, current[step]) for step in ("Prefill", "Decode (token)")))
        self._live.update(Group(self._progress(), Padding(_results_table(self._results), (1, 0)), spread), refresh=True)

    def _progress(self) -> RenderableType:
        done = (len(self._results) - 1) * self._runs_per_size + self._num_runs
        lines = Table.grid(padding=(0, 1))
        lines.add_row("all", _bar(done, self._num_sizes * self._runs_per_size))
        lines.add_row(f"batch size {self._results[-1].batch_size}", _bar(self._num_runs, self._runs_per_size))
        return lines


def describe(measured: Measured) -> str:
    """One batch size in one line."""
    words = [f"batch size {measured.batch_size}: prefill {_average(measured.latencies['Prefill'])} ms"]
    words.append(f"{_average(measured.throughputs['Prefill'], 0)} tokens/s")
    if measured.decodes:
        words.append(f"decode {_average(measured.latencies['Decode (token)'])} ms a token")
        words.append(f"{_average(measured.throughputs['Decode'], 0)} tokens/s")
    return ", ".join(words)


def sparkline(values: Sequence[float]) -> str:
    """Each value as a bar between the lowest and the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1)) if span else 0] for value in values)


def _results_table(results: Sequence[Measured]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("Batch", "Prefill ms", "tokens/s", "Decode ms", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("Runs")
    for measured in results:
        latencies, throughputs = measured.latencies, measured.throughputs
        table.add_row(
            str(measured.batch_size),
            _average(latencies["Prefill"]),
            _average(throughputs["Prefill"], 0),
            _average(latencies["Decode (token)"]),
            _average(throughputs["Decode"], 0),
            Text(sparkline(latencies["Decode (total)"] or latencies["Prefill"])[-BAR_WIDTH:], style="cyan"),
        )
    return table


def _histogram(title: str, values: Sequence[float]) -> RenderableType:
    table = Table(box=None, pad_edge=False, title=f"{title}, ms", title_justify="left", show_header=False)
    table.add_column(justify="right")
    table.add_column(width=BAR_WIDTH)
    bins = histogram(values, NUM_BINS)
    most = max((item.count for item in bins), default=1)
    for item in bins:
        bar = "█" * round(item.count / most * BAR_WIDTH)
        table.add_row(f"{item.low:.2f} - {item.high:.2f}", Text(bar, style="cyan"))
    return table


def _bar(done: int, total: int) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    line.add_row(ProgressBar(total=total, completed=done, width=BAR_WIDTH * 2), f"{done}/{total}")
    return line


def _average(values: Sequence[float], digits: int = 2) -> str:
    return f"{sum(values) / len(values):,.{digits}f}" if values else "-"
