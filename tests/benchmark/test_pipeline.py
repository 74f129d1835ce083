"""What `benchmarks/pipeline.py` makes of the times at which stages computed."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pipeline import common, intervals, length, merged
from legato.server.nodes.stage import COMPUTED


def test_moments_count_once() -> None:
    assert merged([(5, 7), (1, 3), (2, 4), (7, 8)]) == [(1, 4), (5, 8)]
    assert length([(1, 4), (5, 8)]) == 6
    assert common([(0, 10)], [(5, 12)]) == 5
    assert common([(0, 2)], [(5, 12)]) == 0


def test_times_are_read_from_the_log_and_cut_to_what_was_measured(tmp_path: Path) -> None:
    steps = [(0, 5), (8, 12), (18, 30), (40, 50)]
    lines = [json.dumps({"message": COMPUTED, "fields": {"began": first, "ended": last}}) for first, last in steps]
    (tmp_path / "log").write_text("\n".join(["not JSON", *lines, json.dumps({"message": "Other"})]))
    assert intervals(tmp_path / "log", 10, 25) == [(10, 12), (18, 25)]
