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
    limits = [_first_version(cgroups)]
    folder = cgroups
    limits.append(_second_version(folder))
    for part in Path(_own_group(own)).parts:
        folder = cgroups if part == "/" else folder / part
        limits.append(_second_version(folder))
    return min((limit for limit in limits if limit is not None), default=None)


def _own_group(own: Path) -> str:
    """The path of this process's group in the unified hierarchy."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")


def _second_version(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _first_version(cgroups: Path) -> float | None:
    try:
        quota, period = (int((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
