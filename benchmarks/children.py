"""Programs that a benchmark starts, and must not leave behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STOP_SECONDS = 20.0
# Of one benchmark: weights are made up on the device, so even the largest model is there within a minute or two.
LIMIT_SECONDS = 600.0
# Of a child that ends without an error of its own.
SHOWN_LINES = 12


class BenchmarkFailed(Exception):
    """Something could not be measured; the message is what the benchmark said last."""


def figures_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a Python program with `--json` writes. Its progress goes to our stderr, as it comes; its table has nothing
    that the file has not."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        child = subprocess.Popen(
            [sys.executable, *words, f"--json={file}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        limit = threading.Timer(LIMIT_SECONDS, child.terminate)
        try:
            limit.start()
            said = _pass_on(child)
            code = child.wait()
        finally:
            is_late = limit.finished.is_set()
            limit.cancel()
            stop(child)
        if is_late:
            raise BenchmarkFailed(f"not done after {LIMIT_SECONDS:.0f} s")
        if code != 0:
            raise BenchmarkFailed(_last_words(said) or f"ended with code {code}")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def _pass_on(child: subprocess.Popen[str]) -> list[str]:
    """All lines of its stderr, once it has closed that."""
    assert child.stderr is not None
    lines: list[str] = []
    for line in child.stderr:
        sys.stderr.write(line)
        sys.stderr.flush()
        lines.append(line.rstrip())
    return lines


def _last_words(lines: Sequence[str]) -> str:
    """The error, which may quote a few lines of the shard, without the progress before it."""
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[0] :] if starts else lines[-SHOWN_LINES:]).removeprefix("error: ")


def stop(child: subprocess.Popen[str]) -> None:
    """Gently, and if that takes too long, at once."""
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def leave_nothing_behind() -> None:
    """From now on SIGTERM ends this program by way of every `finally`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
