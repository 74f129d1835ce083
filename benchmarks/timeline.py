"""A picture of decode steps on a GPU, kernel by kernel, while a scheduler drives the shard through its gRPC stream.

    python -m benchmarks.timeline --json benchmarks/results/timeline.json --picture docs/timeline.svg

The shard runs in a process of its own, as it always does. Once a file says so it records a number of steps with torch's
profiler, on the thread that launches them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.benchmark.engine.session import connect, opened
from legato.benchmark.engine.workloads import custom
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import ShardProcess
from legato.common.errors import LegatoError
from legato.common.options import RouterOptions
from legato.modelfiles.shapes import write_shape
from legato.pb import generate_pb2 as pb

if TYPE_CHECKING:
    from legato.server.pending import Pending  # and torch with it

# The kernel that a decode step begins with.
FIRST_KERNEL = "_gather_rows_kernel"
PROMPT, NEW = 128, 600
# Seconds after which every prompt is computed. Then so many steps are recorded, which stands still for seconds before
# and after them.
SETTLED, RECORDED_STEPS, PATIENCE = 1.5, 60, 120
SHOWN_STEPS = 3
KINDS = {
    "attention": ("_decode_kernel", "_merge_kernel"),
    "norm, rotary, gate": ("_norm_kernel", "_rotary_and_store_kernel", "_gate_and_mul_kernel"),
    "rows, sampling, copies": ("_gather_rows", "_advance_rows", "_sample_kernel", "Memcpy", "Memset", "elementwise"),
}
MATRIX_PRODUCT = "matrix product"
COLOURS = {MATRIX_PRODUCT: "#4269d0", "attention": "#ef8a3c", "norm, rotary, gate": "#3ca951"} | {
    "rows, sampling, copies": "#9c6b4e"
}


@dataclass(frozen=True)
class Activity:
    """Something that the device did, in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def kind(self) -> str:
        known = (kind for kind, parts in KINDS.items() if any(part in self.name for part in parts))
        return next(known, MATRIX_PRODUCT)


@dataclass(frozen=True)
class Timeline:
    batch: int
    steps: list[list[Activity]]

    @property
    def gaps(self) -> list[float]:
        """Between the end of a step's last activity and the begin of the next one's first."""
        pairs = itertools.pairwise(self.steps)
        return [max(0.0, after[0].start - max(activity.end for activity in before)) for before, after in pairs]

    def figures(self) -> dict[str, Any]:
        lengths = [after[0].start - before[0].start for before, after in itertools.pairwise(self.steps)]
        return {
            "batch": self.batch,
            "steps": len(self.steps),
            "step_us_p50": statistics.median(lengths),
            "gap_us_p50": statistics.median(self.gaps),
            "gap_us_max": max(self.gaps),
            "gaps_us": [round(gap, 1) for gap in self.gaps],
            "busy_us_by_kind": {kind: self._busy(kind) for kind in COLOURS},
        }

    def _busy(self, kind: str) -> float:
        return statistics.mean(sum(a.duration for a in step if a.kind == kind) for step in self.steps)


def cut_into_steps(batch: int, activities: Sequence[Activity]) -> Timeline:
    """A step begins with its first kernel, or with the copy of the row numbers right before it. The last one of a
    recording is not whole. Before the first two the profiler stood still to begin, and no step was under way."""
    ordered = sorted(activities, key=lambda activity: activity.start)
    begins = [
        place - (place > 0 and "HtoD" in ordered[place - 1].name)
        for place, activity in enumerate(ordered)
        if FIRST_KERNEL in activity.name
    ]
    steps = [ordered[begin:end] for begin, end in itertools.pairwise(begins)]
    return Timeline(batch, steps[2:])


# ---- recording ------------------------------------------------------------------------------------------------------


class Recorder:
    """Looks for the file before every step that is launched, and profiles those that follow once it is there."""

    def __init__(self, wanted: Path, trace: Path, num_steps: int = RECORDED_STEPS) -> None:
        self._wanted = wanted
        self._trace = trace
        self._left = num_steps
        self._profiler: Any = None

    def before_step(self) -> None:
        if self._left < 0 or (self._profiler is None and not self._wanted.exists()):
            return
        if self._profiler is None:
            self._profiler = _profiler()
            self._profiler.start()
        if self._left == 0:
            self._profiler.stop()
            unfinished = self._trace.with_suffix(".part")
            self._profiler.export_chrome_trace(str(unfinished))
            unfinished.rename(self._trace)
        self._left -= 1


def _profiler() -> Any:
    import torch

    activities = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activities.CUDA if torch.cuda.is_available() else activities.CPU])


def run_shard(model: str, socket: str, wanted: str, trace: str) -> None:
    """A shard that can be profiled."""
    from legato.server.cli import main
    from legato.server.engine import Engine

    recorder, launch = Recorder(Path(wanted), Path(trace)), Engine.launch

    def recorded(engine: Engine, request: pb.StepRequest) -> Pending:
        recorder.before_step()
        return launch(engine, request)

    Engine.launch = recorded  # type: ignore[method-assign, assignment]
    sys.argv = ["text-generation-server", "serve", model, "--load-format=dummy", f"--uds-path={socket}"]
    main()


async def record(batch: int, shard: ShardProcess, wanted: Path, trace: Path, log: Path) -> Timeline:
    shards, info = await connect(shard)
    tokens = batch * (PROMPT + NEW + info.block_size)
    options = RouterOptions(
        max_concurrent_requests=batch,
        max_batch_size=batch,
        max_total_tokens=PROMPT + NEW + 1,
        max_batch_total_tokens=tokens,
    )
    try:
        async with opened(shards, info, options) as session:
            work = custom(batch, PROMPT, NEW, info.vocab_size)
            await session.run(work)  # captures graphs
            running = asyncio.ensure_future(session.run(work))
            await asyncio.sleep(SETTLED if batch > 1 else SETTLED / 2)
            wanted.touch()
            await running
            deadline = time.monotonic() + PATIENCE
            while not trace.exists():
                shard.check_alive()
                if time.monotonic() > deadline:
                    raise SystemExit(f"the profiler wrote nothing; the shard says:\n{log.read_text()[-3000:]}")
                await asyncio.sleep(0.1)
    finally:
        await shards.close()
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    activities = [Activity(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") in kinds]
    if not activities:
        raise SystemExit("error: nothing was recorded that ran on a GPU; is there one?")
    return cut_into_steps(batch, activities)


def timeline(model: str, batch: int) -> Timeline:
    with tempfile.TemporaryDirectory(prefix="legato-timeline-") as folder:
        where = str(write_shape(model, Path(folder) / model))
        wanted, trace, log = (Path(folder) / name for name in ("record", "trace.json", "shard.log"))
        command = [sys.executable, "-m", "benchmarks.timeline", "--shard", where, f"{folder}/shard"]
        command += [str(wanted), str(trace)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        shard = ShardProcess(f"{folder}/shard-0", process, log)
        try:
            return asyncio.run(record(batch, shard, wanted, trace, log))
        except LegatoError:
            shard.check_alive(patience=0.5)  # its own words say more than a broken stream
            raise
        finally:
            shard.stop()


# ---- drawing --------------------------------------------------------------------------------------------------------

WIDTH, LANE, LEFT = 1200, 92, 10


def picture(timelines: Sequence[Timeline]) -> str:
    """One lane per batch size: some steps from the middle of the recording, and the idle time between them."""
    height = 40 + LANE * len(timelines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for number, each in enumerate(timelines):
        parts += _lane(each, 40 + LANE * number)
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> list[str]:
    return [
        f'<rect x="{LEFT + 190 * place}" y="10" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 18 + 190 * place}" y="20" font-size="12">{escape(kind)}</text>'
        for place, (kind, colour) in enumerate(COLOURS.items())
    ]


def _lane(each: Timeline, top: int) -> list[str]:
    first = max(0, len(each.steps) // 2 - 1)
    shown = each.steps[first : first + SHOWN_STEPS]
    begin = shown[0][0].start
    scale = (WIDTH - 2 * LEFT) / (max(a.end for a in shown[-1]) - begin)
    title = (
        f"batch {each.batch}: {len(shown)} of {len(each.steps)} decode steps, "
        f"{statistics.median(each.gaps):.0f} µs idle between two (most {max(each.gaps):.0f} µs)"
    )
    parts = [f'<text x="{LEFT}" y="{top + 14}" font-size="13">{escape(title)}</text>']
    for number, step in enumerate(shown):
        x = LEFT + (step[0].start - begin) * scale
        length = max(a.end for a in step) - step[0].start
        parts.append(f'<text x="{x:.1f}" y="{top + 78}" font-size="11">step {number + 1}: {length / 1e3:.2f} ms</text>')
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 20}" y2="{top + 66}" stroke="black"/>')
        parts += [
            f'<rect x="{LEFT + (a.start - begin) * scale:.2f}" y="{top + 22}" width="{a.duration * scale:.2f}" '
            f'height="42" fill="{COLOURS[a.kind]}"/>'
            for a in step
        ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a shape of `legato bench engine`")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--picture", help="write the picture (SVG) here")
    parser.add_argument("--shard", nargs=4, metavar=("MODEL", "SOCKET", "WANTED", "TRACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shard:
        run_shard(*options.shard)
        return
    timelines = [timeline(options.model, batch) for batch in options.batch]
    figures = [each.figures() for each in timelines]
    print(json.dumps(figures, indent=2))
    if options.json:
        write_json(options.json, environment() | {"timelines": figures})
    if options.picture:
        Path(options.picture).write_text(picture(timelines))


if __name__ == "__main__":
    main()
