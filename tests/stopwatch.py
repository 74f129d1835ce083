"""Time limits that hold on a busy machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil


@dataclass
class Stopwatch:
    """Seconds that something took, without the seconds in which other processes had the cores.

    That is the wall clock on a machine with a free core. Where no core is free it is the processor time of this process
    and of its children, plus the time for which a core was idle: only then can somebody have waited for anything other
    than a core. A time limit checked with it is as strict as the wall clock on an idle machine.
    """

    _wall: float = field(default_factory=time.monotonic)
    _used: float = field(default_factory=lambda: _processor_seconds())
    _idle: float = field(default_factory=lambda: _idle_seconds())

    @property
    def seconds(self) -> float:
        return self.seconds_of(_processor_seconds() - self._used)

    def seconds_of(self, used: float) -> float:
        """Of something that used so much processor time, while this process did other things as well."""
        return min(time.monotonic() - self._wall, used + _idle_seconds() - self._idle)


def _processor_seconds() -> float:
    """Of this process, of its children, alive or not, and of theirs."""
    times = os.times()
    used = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            alive = child.cpu_times()
            used += alive.user + alive.system + alive.children_user + alive.children_system
        except psutil.Error:
            continue
    return used


def _idle_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
