"""The figures as a page: curves over the batch sizes, TGI's tables, and where they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from legato.benchmark.chart import Curve, line_chart
from legato.benchmark.tgi.report import (
    LATENCY_HEADER,
    PARAMETER_HEADER,
    THROUGHPUT_HEADER,
    latency_rows,
    parameter_rows,
    throughput_rows,
)
from legato.benchmark.tgi.unary import Measured

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #8a929b; --grid: #d9dde2; --a: #1f6feb; --b: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --grid: #363c44; --a: #6cb0ff; --b: #ff9d66; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1020px; margin: 2rem auto; padding: 0 1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .8rem; border-bottom: 1px solid var(--grid); text-align: left; }
svg text { font-size: 11px; fill: var(--faint); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .axis, svg .label { text-anchor: middle; }
svg .tick, svg .legend { text-anchor: end; }
svg .grid { stroke: var(--grid); }
.curve { color: var(--a); } .curve.c1 { color: var(--b); }
.curve polyline { fill: none; stroke: currentColor; stroke-width: 2; }
.curve circle, .curve .legend { fill: currentColor; }
"""


def page(circumstances: dict[str, Any], asked: dict[str, object], results: Sequence[Measured]) -> str:
    """One file that stands for itself."""
    body = f"""<div class="charts">
{_charts(results)}
</div>
<h2>Latency</h2>
{html_table(LATENCY_HEADER, latency_rows(results))}
<h2>Throughput</h2>
{html_table(THROUGHPUT_HEADER, throughput_rows(results))}
<h2>Parameters</h2>
{html_table(PARAMETER_HEADER, parameter_rows(asked))}"""
    return document(f"Benchmark of {asked['Model']}", body, circumstances)


def document(title: str, body: str, circumstances: dict[str, Any]) -> str:
    """The frame of every report: title and style above, where it was measured below."""
    machine = {name: value for name, value in circumstances["machine"].items() if value}
    facts = {"Date": circumstances["date"], "Command": circumstances["command"], "Legato": circumstances["legato"]}
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<h1>{escape(title)}</h1>
{body}
<h2>Machine</h2>
{html_table(("Fact", "Value"), [(name, _spell(value)) for name, value in (facts | machine).items()])}
</html>
"""


def _charts(results: Sequence[Measured]) -> str:
    labels = [str(measured.batch_size) for measured in results]
    return "\n".join(
        [
            line_chart("Prefill latency, ms", "batch size", labels, _latency(results, "Prefill")),
            line_chart("Decode latency, ms a token", "batch size", labels, _latency(results, "Decode (token)")),
            line_chart("Prefill throughput, tokens/s", "batch size", labels, _throughput(results, "Prefill")),
            line_chart("Decode throughput, tokens/s", "batch size", labels, _throughput(results, "Decode")),
        ]
    )


def _latency(results: Sequence[Measured], step: str) -> list[Curve]:
    summaries = [measured.latency(step) for measured in results]
    return [
        Curve("p50", [None if summary is None else summary.p50 for summary in summaries]),
        Curve("p99", [None if summary is None else summary.p99 for summary in summaries]),
    ]


def _throughput(results: Sequence[Measured], step: str) -> list[Curve]:
    summaries = [measured.throughput(step) for measured in results]
    return [Curve("average", [None if summary is None else summary.average for summary in summaries])]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _spell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
