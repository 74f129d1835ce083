"""The number of compute threads: at most as many CPUs as this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores in the affinity mask, or of the CPU quota of the container rounded up, whichever is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups, own)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _quota(cgroups: Path, own: Path) -> float | None:
    """Cores, of the tightest limit on the way to the root; None without one."""
    limits = [_second_version(folder) for folder in _on_the_way(cgroups, own, "")]
    limits += [_first_version(folder) for folder in _on_the_way(cgroups / "cpu", own, "cpu")]
    return min((limit for limit in limits if limit is not None), default=None)


def _on_the_way(root: Path, own: Path, controller: str) -> list[Path]:
    """Folders from a hierarchy's root to this process's group: that of the controller, or "" for the unified one."""
    folders = [root]
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return folders
    path = next((line[2] for line in lines if controller in line[1].split(",")), "/")
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return folders


def _second_version(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _first_version(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
