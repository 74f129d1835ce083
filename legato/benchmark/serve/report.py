"""The figures of `legato bench serve`, from records to tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from legato.benchmark.report import Summary, markdown
from legato.benchmark.serve.client import Record
from legato.benchmark.serve.load import LevelRun
from legato.benchmark.serve.work import LoadLevel

RATES_HEADER = ("Load", "Requests", "Failed", "Requests/s", "Tokens/s", "Good")
# Two tables, because one does not fit a terminal.
TIMES_HEADER = ("Load", "TTFT p50", "p95", "p99", "Gap mean", "p50", "p95", "p99", "Total p50", "p99")
# A client busier than this may have been the limit.
BUSY = 0.9


@dataclass(frozen=True)
class Failures:
    """All failures of one kind, and the message of one of them."""

    count: int
    example: str


@dataclass(frozen=True)
class Slo:
    """Limits that a good request keeps, in milliseconds; None is no limit."""

    ttft: float | None = None
    itl: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def is_kept(self, record: Record) -> bool:
        assert record.ttft is not None
        gap = record.mean_gap
        in_time = self.ttft is None or record.ttft * 1e3 <= self.ttft
        return in_time and (self.itl is None or gap is None or gap * 1e3 <= self.itl)


@dataclass(frozen=True)
class LoadFigures:
    """One level. Rates count what succeeded, over the time from the start to the end of the last answer."""

    seconds: float
    num_succeeded: int
    num_failed: int
    num_in: int | None  # prompt tokens, if the server reports them
    num_out: int
    requests_per_second: float
    tokens_per_second: float
    # Summaries are in milliseconds.
    ttft: Summary | None
    itl: Summary | None
    latency: Summary | None
    # Good requests per second, and their share of all, failed ones included. None without an SLO.
    goodput: float | None
    good_share: float | None
    failures: dict[str, Failures]
    # How late the client was with sending, and the CPU share of its busiest process.
    late: Summary | None
    client_cpu: float

    @classmethod
    def of(cls, run: LevelRun, slo: Slo) -> LoadFigures:
        done = [record for record in run.records if record.error is None]
        seconds = max((record.due + record.latency for record in run.records), default=0.0)
        num_out = sum(record.num_tokens for record in done)
        prompts = [record.num_prompt for record in done if record.num_prompt is not None]
        num_good = sum(slo.is_kept(record) for record in done)

        def rate(count: int) -> float:
            return count / seconds if seconds > 0 else 0.0

        return cls(
            seconds=seconds,
            num_succeeded=len(done),
            num_failed=len(run.records) - len(done),
            num_in=sum(prompts) if prompts and len(prompts) == len(done) else None,
            num_out=num_out,
            requests_per_second=rate(len(done)),
            tokens_per_second=rate(num_out),
            ttft=Summary.in_ms(record.ttft for record in done if record.ttft is not None),
            itl=Summary.in_ms(gap for record in done for gap in record.gaps),
            latency=Summary.in_ms(record.latency for record in done),
            goodput=rate(num_good) if slo.is_set else None,
            good_share=num_good / len(run.records) if slo.is_set and run.records else None,
            failures=_failures(run.records),
            late=Summary.in_ms(record.late for record in run.records),
            client_cpu=max(run.cpu_shares, default=0.0),
        )


def _failures(records: list[Record]) -> dict[str, Failures]:
    """Most frequent first."""
    kinds = Counter(record.error for record in records if record.error is not None)
    examples = {record.error: record.detail for record in reversed(records) if record.error is not None}
    return {kind: Failures(count, examples[kind]) for kind, count in kinds.most_common()}


@dataclass(frozen=True)
class LevelResult:
    """A level with its figures, and the records that they come from."""

    level: LoadLevel
    processes: int
    figures: LoadFigures
    records: list[Record]


def summary(results: Sequence[LevelResult]) -> str:
    """The tables, what failed, and whether the client kept up."""
    parts = [markdown(RATES_HEADER, [_rates(result) for result in results])]
    parts += ["Times in milliseconds:", markdown(TIMES_HEADER, [_times(result) for result in results])]
    return "\n\n".join([*parts, *(line for result in results for line in remarks(result))])


def remarks(result: LevelResult) -> list[str]:
    figures, name = result.figures, result.level.name
    lines = [
        f"{name}: {failures.count} × {kind}, such as: {failures.example}" for kind, failures in figures.failures.items()
    ]
    if figures.client_cpu > BUSY:
        lines.append(
            f"{name}: the client was busy {figures.client_cpu:.0%} of the time and may have been the limit:"
            " use more --processes, or run it on other cores"
        )
    return lines


def _rates(result: LevelResult) -> list[str]:
    figures = result.figures
    counts = [f"{figures.num_succeeded:,}", f"{figures.num_failed:,}"]
    rates = [f"{figures.requests_per_second:,.2f}", f"{figures.tokens_per_second:,.1f}"]
    good = "-" if figures.good_share is None else f"{figures.goodput:.2f}/s ({figures.good_share:.0%})"
    return [result.level.name, *counts, *rates, good]


def _times(result: LevelResult) -> list[str]:
    figures = result.figures
    return [
        result.level.name,
        *_cells(figures.ttft, "p50", "p95", "p99"),
        *_cells(figures.itl, "average", "p50", "p95", "p99"),
        *_cells(figures.latency, "p50", "p99"),
    ]


def _cells(summary: Summary | None, *names: str) -> list[str]:
    """Four digits or more: what is read of a latency."""
    if summary is None:
        return ["-"] * len(names)
    values = (float(getattr(summary, name)) for name in names)
    return [f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}" for value in values]


def to_json(environment: dict[str, Any], asked: dict[str, Any], results: Sequence[LevelResult]) -> dict[str, Any]:
    """With every request, but without the gaps between its tokens, which would be millions."""
    return {**environment, **asked, "results": [_result(result) for result in results]}


def _result(result: LevelResult) -> dict[str, Any]:
    figures = asdict(result.figures)
    summaries = {f"{name}_ms": _summary(figures.pop(name)) for name in ("ttft", "itl", "latency", "late")}
    return {
        "load": result.level.name,
        "concurrency": result.level.concurrency,
        "rate": result.level.rate,
        "processes": result.processes,
        **figures,
        **summaries,
        "requests": [_request(record) for record in result.records],
    }


def _summary(values: dict[str, float] | None) -> dict[str, float] | None:
    return values and {"mean": values["average"], **{name: values[name] for name in ("p50", "p95", "p99", "highest")}}


def _request(record: Record) -> dict[str, Any]:
    if record.error is not None:
        return {"due": record.due, "latency_ms": record.latency * 1e3, "error": record.error, "detail": record.detail}
    return {
        "due": record.due,
        "ttft_ms": None if record.ttft is None else record.ttft * 1e3,
        "latency_ms": record.latency * 1e3,
        "num_tokens": record.num_tokens,
    }
