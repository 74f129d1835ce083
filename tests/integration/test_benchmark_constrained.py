"""benchmarks/constrained.py against a real server: both grammars are measured, and the ratio is that of the pairs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.integration.processes import Launched

ROOT = Path(__file__).parents[2]


def test_the_figures_are_printed_and_written_with_their_circumstances(server: Launched, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.constrained", f"--port={server.port}", "--streams=2", "--new-tokens=5"]
    words += ["--pairs=2", f"--out={tmp_path}/constrained.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["json", "regex"]
    figures = json.loads((tmp_path / "constrained.json").read_text())
    assert {"date", "command", "commit", "machine", "work"} <= set(figures)
    for name in ("json", "regex"):
        pairs = zip(figures[name]["constrained"], figures[name]["free"], strict=True)
        assert figures[name]["ratio"] == statistics.median([rate / free for rate, free in pairs])
