"""Curves as SVG, drawn by hand: no scripts, no fonts and nothing to fetch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 34, 40  # margins around the plot


@dataclass(frozen=True)
class Curve:
    """`values[i]` belongs to the i-th label of the x axis; None leaves a gap."""

    name: str
    values: Sequence[float | None]


def line_chart(title: str, x_name: str, labels: Sequence[str], curves: Sequence[Curve]) -> str:
    """The labels stand at equal distances: batch sizes mostly double, and would crowd at the left of a true scale."""
    ticks = axis_ticks(max((value for curve in curves for value in curve.values if value is not None), default=1.0))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
        *(_grid_line(tick, ticks[-1]) for tick in ticks),
        *(_x_label(label, index, len(labels)) for index, label in enumerate(labels)),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">{escape(x_name)}</text>',
    ]
    for number, curve in enumerate(curves):
        parts += _curve(curve, number, labels, ticks[-1])
    return "\n".join([*parts, "</svg>"])


def axis_ticks(highest: float, count: int = 5) -> list[float]:
    """Round numbers from zero to `highest` or just above, about `count` of them."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _curve(curve: Curve, number: int, labels: Sequence[str], top: float) -> list[str]:
    points = [
        (_x(index, len(labels)), _y(value, top), f"{curve.name}, {labels[index]}: {value:,.2f}")
        for index, value in enumerate(curve.values)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(note)}</title></circle>' for x, y, note in points]
    legend = f'<text class="legend" x="{WIDTH - RIGHT}" y="{16 + 13 * number}">{escape(curve.name)}</text>'
    return [f'<g class="curve c{number}">', f'<polyline points="{path}"/>', *dots, legend, "</g>"]


def _grid_line(tick: float, top: float) -> str:
    y = _y(tick, top)
    line = f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
    return f'{line}<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}">{tick:,.6g}</text>'


def _x_label(label: str, index: int, count: int) -> str:
    return f'<text class="label" x="{_x(index, count):.1f}" y="{HEIGHT - BOTTOM + 16}">{escape(label)}</text>'


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
