"""What `legato bench serve` has to say in the end: a table, all of it as data, and a page with curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from legato.benchmark.chart import Curve, line_chart
from legato.benchmark.serve.client import Record
from legato.benchmark.serve.figures import Result, Spread
from legato.benchmark.stats import percentile
from legato.benchmark.tables import markdown
from legato.benchmark.tgi.page import document, html_table

HEADER = (
    "Load", "Requests", "Failed", "Requests/s", "Tokens/s", "TTFT p50 ms", "p95", "p99",
    "Gap mean ms", "p50", "p95", "p99", "Latency p50 s", "p99", "Good",
)  # fmt: skip
# A client that is busier than this may have been the limit.
BUSY = 0.9
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
NUM_MOMENTS = 20


def summary(results: Sequence[Result]) -> str:
    """The table, what failed, and whether the client kept up."""
    parts = [markdown(HEADER, [_row(result) for result in results])]
    return "\n\n".join([*parts, *(line for result in results for line in remarks(result))])


def remarks(result: Result) -> list[str]:
    figures, name = result.figures, result.level.name
    lines = [
        f"{name}: {failures.count} × {kind}, such as: {failures.example}" for kind, failures in figures.failures.items()
    ]
    if figures.client_cpu > BUSY:
        lines.append(
            f"{name}: the client was busy {figures.client_cpu:.0%} of the time and may have been the limit:"
            " give it more --processes, or cores of its own"
        )
    return lines


def _row(result: Result) -> list[str]:
    figures = result.figures
    counts = [f"{figures.num_succeeded:,}", f"{figures.num_failed:,}"]
    rates = [f"{figures.requests_per_second:,.2f}", f"{figures.tokens_per_second:,.1f}"]
    good = "-" if figures.good_share is None else f"{figures.goodput:.2f}/s ({figures.good_share:.0%})"
    return [
        result.level.name, *counts, *rates,
        *_cells(figures.ttft, "p50", "p95", "p99"),
        *_cells(figures.itl, "mean", "p50", "p95", "p99"),
        *_cells(figures.latency, "p50", "p99", scale=1e-3),
        good,
    ]  # fmt: skip


def _cells(spread: Spread | None, *names: str, scale: float = 1.0) -> list[str]:
    return ["-" if spread is None else f"{getattr(spread, name) * scale:,.2f}" for name in names]


def to_json(around: dict[str, Any], asked: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Every request is in it, without the gaps between its tokens, which would be millions."""
    return {**around, **asked, "results": [_result(result) for result in results]}


def _result(result: Result) -> dict[str, Any]:
    figures = asdict(result.figures)
    spreads = {f"{name}_ms": figures.pop(name) for name in ("ttft", "itl", "latency", "late")}
    return {
        "load": result.level.name,
        "concurrency": result.level.concurrency,
        "rate": result.level.rate,
        "processes": result.processes,
        **figures,
        **spreads,
        "requests": [_request(record) for record in result.records],
    }


def _request(record: Record) -> dict[str, Any]:
    if record.error is not None:
        return {"due": record.due, "latency_ms": record.latency * 1e3, "error": record.error, "detail": record.detail}
    return {
        "due": record.due,
        "ttft_ms": None if record.ttft is None else record.ttft * 1e3,
        "latency_ms": record.latency * 1e3,
        "num_tokens": record.num_tokens,
    }


# ---- the page -------------------------------------------------------------------------------------------------------


def page(around: dict[str, Any], asked: dict[str, Any], results: Sequence[Result]) -> str:
    """Curves over the levels if there are several, then each level by itself."""
    parts = [f'<div class="charts">\n{_level_charts(results)}\n</div>'] if len(results) > 1 else []
    parts.append(html_table(HEADER, [_row(result) for result in results]))
    for result in results:
        parts.append(f'<h2>{escape(result.level.name)}</h2>\n<div class="charts">\n{_charts(result)}\n</div>')
        parts += [f"<p>{escape(remark)}</p>" for remark in remarks(result)]
    rows = [(name, _spell(value)) for group in asked.values() for name, value in group.items() if value is not None]
    parts.append("<h2>Load</h2>\n" + html_table(("Setting", "Value"), rows))
    return document(f"Benchmark of {asked['server']['url']}", "\n".join(parts), around)


def _level_charts(results: Sequence[Result]) -> str:
    labels = [result.level.name for result in results]

    def over_levels(name: str, *fields: str) -> list[Curve]:
        spreads = [getattr(result.figures, name) for result in results]
        return [Curve(field, [spread and getattr(spread, field) for spread in spreads]) for field in fields]

    rates = [Curve("tokens/s", [result.figures.tokens_per_second for result in results])]
    return "\n".join(
        [
            line_chart("Throughput, tokens/s", "load", labels, rates),
            line_chart("First token, ms", "load", labels, over_levels("ttft", "p50", "p99")),
            line_chart("Between tokens, ms", "load", labels, over_levels("itl", "p50", "p99")),
            line_chart("Whole answer, ms", "load", labels, over_levels("latency", "p50", "p99")),
        ]
    )


def _charts(result: Result) -> str:
    done = [record for record in result.records if record.error is None]
    first_tokens = [record.ttft for record in done if record.ttft is not None]
    gaps = [gap for record in done for gap in record.gaps]
    labels, rates, out = _over_time(result)
    return "\n".join(
        [
            line_chart("Tokens/s", "seconds after the start", labels, [Curve("tokens/s", rates)]),
            line_chart("Requests that are out", "seconds after the start", labels, [Curve("requests", out)]),
            _percentiles("First token, ms", first_tokens),
            _percentiles("Between tokens, ms", gaps),
            _percentiles("Whole answer, ms", [record.latency for record in done]),
        ]
    )


def _percentiles(title: str, seconds: Sequence[float]) -> str:
    ordered = sorted(value * 1e3 for value in seconds)
    values = [percentile(ordered, percent) if ordered else None for percent in PERCENTS]
    return line_chart(title, "percentile", [str(percent) for percent in PERCENTS], [Curve("ms", values)])


def _over_time(result: Result) -> tuple[list[str], list[float], list[float]]:
    """Labels, tokens per second and mean number of requests that were out, for stretches of equal length."""
    width = max(result.figures.seconds, 1e-9) / NUM_MOMENTS
    tokens, busy = [0.0] * NUM_MOMENTS, [0.0] * NUM_MOMENTS

    def stretch(moment: float) -> int:
        """Clocks of several processes differ a little: something may be before the start or after the end."""
        return min(max(int(moment / width), 0), NUM_MOMENTS - 1)

    for record in result.records:
        for moment in _token_moments(record):
            tokens[stretch(moment)] += 1
        start, end = record.due, record.due + record.latency
        for index in range(stretch(start), stretch(end) + 1):
            busy[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width))
    labels = [f"{(index + 1) * width:.3g}" if index % 4 == 3 else "" for index in range(NUM_MOMENTS)]
    return labels, [count / width for count in tokens], [seconds / width for seconds in busy]


def _token_moments(record: Record) -> list[float]:
    if record.ttft is None:
        return []
    moments = [record.due + record.ttft]
    for gap in record.gaps:
        moments.append(moments[-1] + gap)
    return moments


def _spell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
