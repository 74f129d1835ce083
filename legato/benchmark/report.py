"""What every benchmark reports: summaries of measurements, Markdown tables, and where the figures were measured."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import legato
from legato.common.errors import OptionError

# Read from package metadata: importing torch takes seconds, and this process has no use for it.
PACKAGES = ("torch", "triton", "grpcio")


@dataclass(frozen=True, slots=True)
class Summary:
    """Many measurements in a few numbers, in the unit they were measured in."""

    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """None where nothing was measured: a generation of one token has no decode."""
        ordered = sorted(values)
        if not ordered:
            return None
        percentiles = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(math.fsum(ordered) / len(ordered), ordered[0], ordered[-1], *percentiles)

    @classmethod
    def in_ms(cls, seconds: Iterable[float]) -> Summary | None:
        return cls.of(value * 1e3 for value in seconds)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, interpolated between its two neighbours."""
    assert ordered, "a percentile needs at least one value"
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well as plain text. Columns of numbers are aligned to the right."""
    assert all(len(row) == len(header) for row in rows), "every row has a cell for every column"
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() or cell in ("", "-") for cell in column[1:]) for column in columns]
    rule = ["-" * (width - 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, (header, rule, *rows)))


def check_writable(flag: str, path: str | None) -> None:
    """Refuse a wrong path before the benchmark has run, not after."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"--{flag} {path}: cannot write a file in {folder}")


def write_json(path: str | Path | None, data: Any) -> None:
    """Paths in this folder become relative, and the home folder `~`: results are published."""
    if path is not None:
        text = json.dumps(data, indent=2).replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
        Path(path).write_text(text + "\n")


def environment() -> dict[str, Any]:
    """The head of every result file: when, how, with which code and on which machine it was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "legato": legato.__version__,
        "commit": commit(Path(legato.__file__).parent),
        "machine": {
            "cpu": _cpu_name(),
            "cores": num_cores(),
            "gpus": (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def commit(source: Path) -> dict[str, Any] | None:
    """The commit of our code and whether the tree is dirty. None for an installed package, which may lie inside the
    checkout of another project. LEGATO_COMMIT names it for a copy without history."""
    if given := os.environ.get("LEGATO_COMMIT"):
        return {"id": given, "dirty": None}
    if _output("git", "-C", str(source), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changes = _output("git", "-C", str(source), "status", "--porcelain", "--", ".")
    return {"id": _output("git", "-C", str(source), "rev-parse", "HEAD"), "dirty": bool(changes)}


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*words: str) -> str | None:
    """What a program prints, or None where it is not installed or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
