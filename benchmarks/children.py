"""Programs that a benchmark starts, and must not leave behind."""

from __future__ import annotations

import subprocess

STOP_SECONDS = 20.0


def stop(child: subprocess.Popen[str]) -> None:
    """Gently, and if that takes too long, at once."""
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
