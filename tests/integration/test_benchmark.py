"""benchmarks/streams.py against a real server: the figures are there, and so is where they come from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.processes import Launched, free_port

ROOT = Path(__file__).parents[2]


def measure(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "benchmarks.streams", f"--port={port}", "--streams=3", "--prompt-tokens=16"]
    words += ["--new-tokens=5", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def test_the_figures_are_printed_and_written_with_their_circumstances(server: Launched, tmp_path: Path) -> None:
    done = measure(server.port, f"--out={tmp_path}/streams.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["3 sequential", "3 concurrent", "ratio"]
    figures = json.loads((tmp_path / "streams.json").read_text())
    assert {"date", "command", "commit", "machine", "work"} <= set(figures)
    rates = [figures[name]["tokens_per_second"] for name in ("sequential", "concurrent")]
    assert figures["ratio"] == rates[1] / rates[0]


def test_a_server_that_is_not_there_is_one_line() -> None:
    port = free_port()
    done = measure(port)
    assert done.returncode == 1
    assert f"--port {port}" in done.stderr
    assert done.stderr.count("\n") == 1
