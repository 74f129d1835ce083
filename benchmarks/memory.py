"""Memory of every process of a server: when it is ready, after the workloads of `legato bench cpu`, and when idle.

    python -m benchmarks.memory                                  the default model
    python -m benchmarks.memory --maps -- --dtype float32        and what the pages of the shard belong to

Memory is the proportional set size: pages that processes share are divided among them, so that the sum is what the
machine has less. Exits with 1 above `--most-mb`, or if the start took more than `--most-seconds`. The start is warm if
the files are in the page cache: run it twice.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import leave_nothing_behind
from legato.benchmark.cpu.engines import ENGINES, started
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.cpu.process_tree import PROC, processes, proportional_bytes
from legato.benchmark.cpu.surroundings import CpuLimit
from legato.benchmark.cpu.work import WARM_UP, chosen, vocabulary_of
from legato.benchmark.report import environment, markdown, write_json
from legato.common.options import DEFAULT_DRAFTS

MB = 1e6
# By a word of its command line; the launcher is the root.
ROLES = {"serve": "shard", "legato.http.worker": "HTTP worker", "legato.ipc.confined": "confined child"}
ROUTER_FLAG = "--master-shard-uds-path"
# The router gives memory back after three seconds without work.
IDLE_SECONDS = 6.0
SHOWN_MAPS = 12


@dataclass(frozen=True)
class MemorySample:
    """Bytes by role, and what the shard's pages belong to."""

    moment: str
    roles: dict[str, int]
    maps: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.roles.values())


def role(process_id: int, root: int) -> str:
    if process_id == root:
        return "launcher"
    words = (PROC / str(process_id) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if any(word.startswith(ROUTER_FLAG) for word in words):
        return "router"
    return next((name for word, name in ROLES.items() if word in words), "other")


def maps(process_id: int) -> dict[str, int]:
    """Bytes by mapped file; memory of the process's own is "heap" or, apart from it, "anonymous"."""
    found: Counter[str] = Counter()
    name = ""
    for line in (PROC / str(process_id) / "smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if re.match(r"[0-9a-f]+-[0-9a-f]+$", words[0]):
            name = Path(words[5]).name if len(words) > 5 else "anonymous"
        elif words[0] == "Pss:":
            found[name] += int(words[1]) * 1024
    return dict(found.most_common())


def take(moment: str, root: int, with_maps: bool) -> MemorySample:
    roles: Counter[str] = Counter()
    shard_maps: dict[str, int] = {}
    for process_id in processes(root):
        name = role(process_id, root)
        roles[name] += proportional_bytes(process_id)
        if with_maps and name == "shard":
            shard_maps = maps(process_id)
    return MemorySample(moment, dict(roles), shard_maps)


def measure(model: CpuModel, words: list[str], scale: int, with_maps: bool) -> tuple[float, list[MemorySample]]:
    """Seconds until the server was ready, and its memory."""
    samples = []
    began = time.perf_counter()
    drafting = [f"--speculate={DEFAULT_DRAFTS}", *words]  # a server as it is, and not as it is compared with others
    with started(ENGINES["legato"](model, Path(), drafting), CpuLimit()) as engine:
        engine.wait_until_ready()
        seconds, root, vocabulary = time.perf_counter() - began, engine.process.pid, vocabulary_of(model.files)
        samples.append(take("ready", root, with_maps))
        for workload in (WARM_UP, *chosen(("W1", "W2", "W3", "W4"), scale)):
            engine.run(workload, workload.prompts(vocabulary, seed=1))
        samples.append(take("after W1 to W4", root, with_maps))
        time.sleep(IDLE_SECONDS)
        samples.append(take("idle", root, with_maps))
    return seconds, samples


def tables(samples: list[MemorySample]) -> str:
    header = ["MB", *(sample.moment for sample in samples)]
    names = list(dict.fromkeys(name for sample in samples for name in sample.roles))
    rows = [[name, *(f"{sample.roles.get(name, 0) / MB:,.1f}" for sample in samples)] for name in names]
    rows.append(["total", *(f"{sample.total / MB:,.1f}" for sample in samples)])
    parts = [markdown(header, rows)]
    if most := list(samples[-1].maps)[:SHOWN_MAPS]:
        shown = [[name, *(f"{sample.maps.get(name, 0) / MB:,.1f}" for sample in samples)] for name in most]
        parts.append(markdown(["Shard, MB", *header[1:]], shown))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id; the default model if omitted")
    parser.add_argument("--scale", type=int, default=1, help="divide the workloads by this")
    parser.add_argument("--maps", action="store_true", help="show what the shard's pages belong to")
    parser.add_argument("--most-mb", type=float, default=900.0, help="of all processes after the workloads")
    parser.add_argument("--most-seconds", type=float, help="until the server is ready")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("extra", nargs="*", help="options of the launcher, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seconds, samples = measure(CpuModel(given.model, Path(scratch)), given.extra, given.scale, given.maps)
    print(tables(samples))
    print(f"\nReady after {seconds:.1f} s")
    figures: dict[str, Any] = {"ready_seconds": seconds, "samples": [vars(sample) for sample in samples]}
    write_json(given.json, {**environment(), "launcher_options": given.extra, "scale": given.scale, **figures})
    problems = []
    if samples[1].total > given.most_mb * MB:
        problems.append(f"{samples[1].total / MB:,.0f} MB after the workloads, more than {given.most_mb:,.0f}")
    if given.most_seconds is not None and seconds > given.most_seconds:
        problems.append(f"ready after {seconds:.1f} s, later than {given.most_seconds:g}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
