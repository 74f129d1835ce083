"""Memory of a process and all that it started, read from /proc."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
KIB = 1024


def processes(root: int) -> list[int]:
    """`root` and its descendants, parents first."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # ended meanwhile
                # The name, in brackets, may itself have spaces and brackets.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children[parent].append(int(folder.name))
    found = [root]
    for process_id in found:
        found += sorted(children[process_id])
    return found


def proportional_bytes(process_id: int) -> int:
    """Resident memory; pages that several processes share are divided among them (PSS). 0 if it has ended."""
    with suppress(OSError):
        for line in (PROC / str(process_id) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


def tree_bytes(root: int) -> int:
    return sum(map(proportional_bytes, processes(root)))
