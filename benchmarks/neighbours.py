"""How much of its speed a server on a CPU keeps beside a busy process, and with less than all cores.

    python -m benchmarks.neighbours                             the default model
    python -m benchmarks.neighbours --model FILE -- --dtype float32     other options of the launcher after --

Runs W1 (one stream) and W2 (16 streams) of `legato bench cpu` alone, beside one process that keeps a core busy, with
`nice` 0 and 19, and limited to 1.5 CPUs. The busy process has a session of its own, as one from another terminal:
where the kernel schedules by session (autogroup) its `nice` value does not count against the server. Exits with 1 if
less than `MUST` of the speed is left.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from legato.benchmark.cpu.engines import ENGINES, EngineFailed, RunningEngine, started
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.cpu.surroundings import CpuLimit, cpu_limit, neighbour
from legato.benchmark.cpu.work import WARM_UP, CpuWorkload, chosen, vocabulary_of
from legato.benchmark.report import environment, markdown, write_json

ALONE, LIMITED = "alone", "1.5 CPUs"
CPUS = 1.5
# Of the speed alone.
MUST = {"beside nice 0": 0.4, "beside nice 19": 0.4, LIMITED: 0.6}
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


class Measured:
    """Tokens per second, by surroundings and workload."""

    def __init__(self, model: CpuModel, workloads: Sequence[CpuWorkload], words: Sequence[str]) -> None:
        self._command = ENGINES["legato"](model, Path(), words)
        self._vocabulary = vocabulary_of(model.files)
        self._workloads = workloads
        self.speeds: dict[str, dict[str, float]] = {}

    def measure(self, limit: CpuLimit, surroundings: dict[str, AbstractContextManager[None]]) -> None:
        """One server, which all of the surroundings are made around in turn."""
        with started(self._command, limit) as engine:
            engine.wait_until_ready()
            self._run(engine, WARM_UP, seed=0)
            for seed, (name, around) in enumerate(surroundings.items(), 1):
                with around:
                    self.speeds[name] = {each.name: self._run(engine, each, seed) for each in self._workloads}
                print(name, self.speeds[name], file=sys.stderr, flush=True)

    def _run(self, engine: RunningEngine, workload: CpuWorkload, seed: int) -> float:
        records, seconds = engine.run(workload, workload.prompts(self._vocabulary, seed))
        if failed := [record for record in records if record.num_tokens != workload.new_tokens]:
            raise EngineFailed(f"{workload.name}: {failed[0].error}: {failed[0].detail}")
        return sum(record.num_tokens for record in records) / seconds

    def shares(self) -> dict[str, dict[str, float]]:
        """Of the speed alone."""
        alone = self.speeds[ALONE]
        return {
            name: {workload: speed / alone[workload] for workload, speed in speeds.items()}
            for name, speeds in self.speeds.items()
            if name != ALONE
        }


def table(measured: Measured) -> str:
    shares = measured.shares()
    rows = []
    for name, speeds in measured.speeds.items():
        cells = [f"{speed:.1f}" + (f" ({shares[name][each]:.2f})" if name in shares else "")
                 for each, speed in speeds.items()]  # fmt: skip
        rows.append([name, *cells, str(MUST.get(name, ""))])
    return markdown(["tok/s (share)", *measured.speeds[ALONE], "must"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id; the default model if omitted")
    parser.add_argument("--scale", type=int, default=1, help="divides requests and tokens of the workloads")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("extra", nargs="*", help="options of the launcher, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, cpu_limit(CPUS) as limit:
        measured = Measured(CpuModel(given.model, Path(scratch)), chosen(("W1", "W2"), given.scale), given.extra)
        beside = {f"beside nice {nice}": neighbour(nice) for nice in (0, 19)}
        measured.measure(CpuLimit(), {ALONE: nullcontext(), **beside})
        measured.measure(limit, {LIMITED: nullcontext()})
    print(table(measured))
    autogroup = AUTOGROUP.read_text().strip() == "1" if AUTOGROUP.exists() else False
    print(f"\nCPU limit: {limit.words}. Scheduled by session (autogroup): {'yes' if autogroup else 'no'}.")
    figures: dict[str, Any] = {"tokens_per_second": measured.speeds, "share_of_alone": measured.shares(), "must": MUST}
    around = {"cpu_limit": limit.words, "autogroup": autogroup, "scale": given.scale, "launcher_options": given.extra}
    write_json(given.json, {**environment(), **around, **figures})
    return 1 if any(share < MUST[name] for name, all_ in measured.shares().items() for share in all_.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
