"""The environment of an engine under test: a busy process on the same machine, and a limit on CPU time.

A limit is a cgroup of its own where one can be made (usually as root), as for a container. Elsewhere it is rounded up
to whole cores and set as CPU affinity, which the report then says.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from legato.common.errors import OptionError

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
# Starts a program inside a cgroup: every process that it starts is in it, too.
ENTER = 'echo $$ > "$0" && exec "$@"'
# Lowers its own priority, then computes for ever.
BUSY = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True: pass"


@contextmanager
def neighbour(nice: int | None) -> Iterator[None]:
    """A process that keeps one core busy while the block runs. In a session of its own: the kernel then schedules it as
    a group, and its priority counts for nothing outside of it (autogroup)."""
    if nice is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(nice)], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class CpuLimit:
    """How the limit is kept: by `procs`, the cgroup's file that takes process ids, or by affinity to `cores`."""

    cpus: float | None = None
    procs: Path | None = None
    cores: frozenset[int] = frozenset()

    @property
    def words(self) -> str:
        """For the report."""
        if self.cpus is None:
            return "none"
        if self.procs is not None:
            return f"{self.cpus:g} CPUs by cgroup"
        return f"affinity to {len(self.cores)} cores (no cgroup can be made here, so {self.cpus:g} was rounded up)"

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` within the limit."""
        return list(command) if self.procs is None else ["/bin/sh", "-c", ENTER, str(self.procs), *command]

    def apply(self, process_id: int) -> None:
        """For a limit by affinity, right after the start: threads that come later inherit it."""
        if self.cores:
            os.sched_setaffinity(process_id, self.cores)


@contextmanager
def cpu_limit(cpus: float | None) -> Iterator[CpuLimit]:
    """A limit to `cpus` cores' worth of time while the block runs."""
    if cpus is None:
        yield CpuLimit()
        return
    available = sorted(os.sched_getaffinity(0))
    if cpus > len(available):
        raise OptionError(f"--cpus {cpus:g}: this machine has {len(available)}")
    folder = _make_cgroup(cpus)
    try:
        if folder is None:
            yield CpuLimit(cpus, cores=frozenset(available[: math.ceil(cpus)]))
        else:
            yield CpuLimit(cpus, folder / "cgroup.procs")
    finally:
        if folder is not None:
            with suppress(OSError):  # a process that has not ended yet keeps it
                folder.rmdir()


def _make_cgroup(cpus: float) -> Path | None:
    quota = round(cpus * PERIOD_US)
    name = f"legato-bench-{os.getpid()}"
    version_1 = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    for parent, limits in (
        (CGROUPS / "cpu" / _own_cgroup("cpu"), version_1),
        (CGROUPS / _own_cgroup(""), {"cpu.max": f"{quota} {PERIOD_US}"}),
    ):
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, value in limits.items():
                if not (folder / file).exists():
                    raise FileNotFoundError(file)
                (folder / file).write_text(value)
            return folder
        except OSError:
            folder.rmdir()
    return None


def _own_cgroup(controller: str) -> str:
    """The path of our cgroup in the hierarchy of a controller; "" is version 2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path.lstrip("/")
    return ""
