"""Where and with what a figure was measured. A figure without these is a rumour."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import legato

# Read from package metadata: importing torch takes seconds, and this process has no use for it.
PACKAGES = ("torch", "triton", "grpcio")


def circumstances() -> dict[str, Any]:
    """What goes at the head of every result file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "legato": legato.__version__,
        "commit": commit(Path(legato.__file__).parent),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": _gpu_names(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def commit(source: Path) -> dict[str, Any] | None:
    """The commit that our code is from, and whether it was changed since. None for an installed package, which may
    well lie inside the checkout of somebody else. LEGATO_COMMIT says it for a copy without its history."""
    if told := os.environ.get("LEGATO_COMMIT"):
        return {"id": told, "dirty": None}
    if _ask("git", "-C", str(source), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changes = _ask("git", "-C", str(source), "status", "--porcelain", "--", ".")
    return {"id": _ask("git", "-C", str(source), "rev-parse", "HEAD"), "dirty": bool(changes)}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpu_names() -> list[str]:
    answer = _ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return answer.splitlines() if answer else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask(*words: str) -> str | None:
    """What a program answers, or None where it is not installed or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
