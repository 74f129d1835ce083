"""Repeats workloads for minutes and checks that the shard's memory does not grow."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from legato.common.errors import LegatoError

MIB = 2**20
# Share of the time at the start that is not judged: caches fill.
WARM_UP_SHARE = 0.25
# Growth that is no leak: fragmentation of the allocators.
TOLERANCE = 64 * MIB
# Seconds after which an idle shard that has captured no further graph will capture none.
CAPTURE_SECONDS = 5.0


class MemoryGrew(LegatoError):
    """The shard uses more memory than before."""


@dataclass(frozen=True)
class MemoryUsage:
    """In bytes; None where it cannot be read."""

    seconds: float
    host: int | None  # resident memory of the shard's process
    device: int | None  # used memory of all GPUs
    blocks: int  # KV blocks that were not freed after the last request


@dataclass
class Soak:
    duration: float
    usages: list[MemoryUsage] = field(default_factory=list)

    @property
    def start(self) -> MemoryUsage:
        """The first reading after warm-up. A single reading is both start and end."""
        warm = [usage for usage in self.usages if usage.seconds >= WARM_UP_SHARE * self.duration]
        return (warm or self.usages)[0]

    @property
    def end(self) -> MemoryUsage:
        return self.usages[-1]

    @property
    def problems(self) -> list[str]:
        found = []
        for name in ("host", "device"):
            before, after = getattr(self.start, name), getattr(self.end, name)
            if before is not None and after is not None and after > before + TOLERANCE:
                found.append(f"{name} memory grew from {before // MIB} to {after // MIB} MiB")
        if held := max(usage.blocks for usage in self.usages):
            found.append(f"{held} KV blocks were never freed")
        return found

    def summary(self) -> str:
        readings = [
            f"{name} {_mib(getattr(self.start, name))} → {_mib(getattr(self.end, name))}" for name in ("host", "device")
        ]
        runs = len(self.usages)
        return f"Soak: {runs} rounds in {self.end.seconds:.0f} s; {', '.join(readings)}; {self.end.blocks} blocks held."

    def to_json(self) -> dict[str, Any]:
        return {"duration": self.duration, "problems": self.problems, "usages": [asdict(each) for each in self.usages]}


async def wait_for_captures(num_uncaptured: Callable[[], Awaitable[int]], patience: float = CAPTURE_SECONDS) -> None:
    """Leave the shard idle until it has captured its CUDA graphs. Otherwise it would capture rare sizes during the
    soak, and their memory would look like a leak."""
    left, changed = await num_uncaptured(), time.monotonic()
    while left and time.monotonic() < changed + patience:
        await asyncio.sleep(patience / 10)
        before, left = left, await num_uncaptured()
        if left != before:
            changed = time.monotonic()


async def soak(run_all: Callable[[], Awaitable[Sequence[int]]], duration: float, path: str) -> Soak:
    """Repeat `run_all`, which returns the blocks held after each of its runs, until the time is over."""
    started = time.perf_counter()
    result = Soak(duration)
    while not result.usages or result.end.seconds < duration:
        held = sum(await run_all())
        result.usages.append(
            MemoryUsage(time.perf_counter() - started, resident_bytes(process_behind(path)), device_bytes(), held)
        )
    return result


def process_behind(path: str) -> int | None:
    """The process that listens on a unix socket."""
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(path)
            process: int = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return process or None
    except (OSError, AttributeError):
        return None


def resident_bytes(process: int | None) -> int | None:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None


def device_bytes() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return sum(map(int, answer.split())) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _mib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes // MIB:,} MiB"
