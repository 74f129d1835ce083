"""Markdown tables that read well as plain text too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns are as wide as their widest cell. A column whose cells begin with digits is aligned to the right."""
    assert all(len(row) == len(header) for row in rows), "every row has a cell for every column"
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() or cell in ("", "-") for cell in column[1:]) for column in columns]
    rule = ["-" * (width - 1) + ":" if is_right else "-" * width for width, is_right in zip(widths, right, strict=True)]
    return "\n".join(_line(cells, widths, right) for cells in (header, rule, *rows))


def _line(cells: Sequence[str], widths: list[int], right: list[bool]) -> str:
    padded = [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
