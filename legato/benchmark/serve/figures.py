"""From what clients saw to what it comes down to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from legato.benchmark.serve.client import Record
from legato.benchmark.serve.load import Counts
from legato.benchmark.serve.work import Level
from legato.benchmark.stats import percentile


@dataclass(frozen=True)
class Spread:
    """Many measurements, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    highest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """None where nothing was measured."""
        ordered = sorted(value * 1e3 for value in seconds)
        if not ordered:
            return None
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True)
class Failures:
    """All failures of one kind, and one of them in words."""

    count: int
    example: str


@dataclass(frozen=True)
class Slo:
    """What a request must keep to be good, in milliseconds; None asks for nothing."""

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
class Figures:
    """One level. Rates count what succeeded, over the time from the start to the end of the last answer."""

    seconds: float
    num_succeeded: int
    num_failed: int
    num_in: int | None  # prompt tokens, where the server tells
    num_out: int
    requests_per_second: float
    tokens_per_second: float
    ttft: Spread | None
    itl: Spread | None
    latency: Spread | None
    # Good requests per second, and their share of all, failed ones included. None without an SLO.
    goodput: float | None
    good_share: float | None
    failures: dict[str, Failures]
    # How late the client was with sending, and how busy the busiest of its processes.
    late: Spread | None
    client_cpu: float

    @classmethod
    def of(cls, counts: Counts, slo: Slo) -> Figures:
        done = [record for record in counts.records if record.error is None]
        seconds = max((record.due + record.latency for record in counts.records), default=0.0)
        num_out = sum(record.num_tokens for record in done)
        prompts = [record.num_prompt for record in done if record.num_prompt is not None]
        num_good = sum(slo.is_kept(record) for record in done)
        return cls(
            seconds=seconds,
            num_succeeded=len(done),
            num_failed=len(counts.records) - len(done),
            num_in=sum(prompts) if prompts and len(prompts) == len(done) else None,
            num_out=num_out,
            requests_per_second=_rate(len(done), seconds),
            tokens_per_second=_rate(num_out, seconds),
            ttft=Spread.of(record.ttft for record in done if record.ttft is not None),
            itl=Spread.of(gap for record in done for gap in record.gaps),
            latency=Spread.of(record.latency for record in done),
            goodput=_rate(num_good, seconds) if slo.is_set else None,
            good_share=num_good / len(counts.records) if slo.is_set and counts.records else None,
            failures=_failures(counts.records),
            late=Spread.of(record.late for record in counts.records),
            client_cpu=max(counts.cpu_shares, default=0.0),
        )


@dataclass(frozen=True)
class Result:
    """A level with its figures, and the records that they come from."""

    level: Level
    processes: int
    figures: Figures
    records: list[Record]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _failures(records: list[Record]) -> dict[str, Failures]:
    """Most frequent first."""
    kinds = Counter(record.error for record in records if record.error is not None)
    examples = {record.error: record.detail for record in reversed(records) if record.error is not None}
    return {kind: Failures(count, examples[kind]) for kind, count in kinds.most_common()}
