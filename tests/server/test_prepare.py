"""In which order the parts of a step are computed."""

from __future__ import annotations

from legato.server.prepare import decodes_first
from legato.server.rows import RowStep


def decode(row: int, start: int) -> RowStep:
    return RowStep(row, start, 1, samples=True, decode=True)


def chunk(row: int, start: int, count: int) -> RowStep:
    return RowStep(row, start, count, samples=False, decode=False)


def test_decodes_come_first_and_the_longest_of_them_before_all() -> None:
    parts = [chunk(0, 500, 8), decode(1, 20), decode(2, 300), chunk(3, 0, 90), decode(4, 21), decode(5, 300)]
    assert [parts[place].row for place in decodes_first(parts)] == [2, 5, 4, 1, 0, 3]
