"""The measurements of every engine, their ratios, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from legato.benchmark.cpu.engines import EngineCommand
from legato.benchmark.cpu.work import CpuFigures
from legato.benchmark.report import markdown

OURS = "legato"
MB = 1e6


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure that engines are compared by: an attribute of `CpuFigures` in one workload."""

    title: str
    workload: str
    attribute: str
    lower_is_better: bool
    digits: int = 1

    def best(self, runs: Sequence[CpuFigures]) -> float | None:
        # Zero where a fake shard's tokens all came in one read: there is no time to compare.
        values = [value for run in runs if (value := getattr(run, self.attribute))]
        if not values:
            return None
        return float(min(values) if self.lower_is_better else max(values))

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times as fast as theirs."""
        return theirs / ours if self.lower_is_better else ours / theirs


COLUMNS = (
    ComparedFigure("W1 ms per token", "W1", "token_ms", lower_is_better=True, digits=2),
    ComparedFigure("W1 first token, ms", "W1", "first_token_ms", lower_is_better=True),
    ComparedFigure("W2 tok/s", "W2", "out_per_second", lower_is_better=False),
    ComparedFigure("W3 prompt tok/s", "W3", "in_per_second", lower_is_better=False),
    ComparedFigure("W4 s", "W4", "seconds", lower_is_better=True, digits=2),
    ComparedFigure("W5 tok/s", "W5", "out_per_second", lower_is_better=False, digits=2),
)


@dataclass
class EngineResult:
    """One engine. Memory is that of its whole process tree."""

    command: EngineCommand
    ready_seconds: float = 0.0
    ready_bytes: int = 0
    final_bytes: int = 0
    # By workload.
    runs: dict[str, list[CpuFigures]] = field(default_factory=dict)

    def best(self, column: ComparedFigure) -> float | None:
        return column.best(self.runs.get(column.workload, []))


@dataclass
class Comparison:
    results: dict[str, EngineResult] = field(default_factory=dict)
    # Engines that were not measured, and why.
    left_out: dict[str, str] = field(default_factory=dict)

    def columns(self) -> list[ComparedFigure]:
        """Those that were measured."""
        return [each for each in COLUMNS if any(each.workload in result.runs for result in self.results.values())]

    def ratio(self, column: ComparedFigure) -> tuple[str, float] | None:
        """The best of the others, and how many times as fast as it we are."""
        found = {name: value for name, result in self.results.items() if (value := result.best(column)) is not None}
        ours = found.pop(OURS, None)
        if ours is None or not found:
            return None
        name = min(found, key=lambda each: column.ratio(ours, found[each]))
        return name, column.ratio(ours, found[name])

    def table(self) -> str:
        names = list(self.results)
        rows = []
        for column in self.columns():
            values = [self.results[name].best(column) for name in names]
            cells = ["-" if value is None else f"{value:,.{column.digits}f}" for value in values]
            rows.append([column.title, *cells, self._ratio_cell(column)])
        finals = [f"{result.final_bytes / MB:,.0f}" for result in self.results.values()]
        rows.append(["Memory after all, MB", *finals, ""])
        rows.append(["Ready after, s", *(f"{result.ready_seconds:.1f}" for result in self.results.values()), ""])
        return markdown(["", *names, f"{OURS} is … times as fast as"], rows)

    def _ratio_cell(self, column: ComparedFigure) -> str:
        found = self.ratio(column)
        return "" if found is None else f"{found[1]:.2f} {found[0]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ratios": {
                column.title: {"best_peer": found[0], "times_as_fast": found[1]}
                for column in self.columns()
                if (found := self.ratio(column)) is not None
            },
            "engines": {
                name: {
                    "version": result.command.version,
                    "command": result.command.words,
                    "variables": dict(result.command.variables),
                    "ready_seconds": result.ready_seconds,
                    "ready_mb": result.ready_bytes / MB,
                    "final_mb": result.final_bytes / MB,
                    "best": {column.title: result.best(column) for column in self.columns()},
                    "runs": {name: [asdict(run) for run in runs] for name, runs in result.runs.items()},
                }
                for name, result in self.results.items()
            },
            "left_out": self.left_out,
        }
