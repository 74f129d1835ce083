"""From records to figures, and what is shown of them."""

from __future__ import annotations

import pytest

from legato.benchmark.report import Summary
from legato.benchmark.serve.client import Record
from legato.benchmark.serve.load import Assignment, LevelRun, num_processes
from legato.benchmark.serve.report import LevelResult, LoadFigures, Slo, remarks, summary, to_json
from legato.benchmark.serve.work import Length, LoadLevel, RequestSource

LEVEL = LoadLevel(concurrency=2, num_requests=4)
AROUND = {"date": "now", "command": "legato bench serve", "legato": "1", "machine": {"cpu": "a fast one"}}
ASKED = {"server": {"url": "http://here"}, "work": {"seed": 0}}


def good(due: float = 0.0, ttft: float = 0.1, gap: float = 0.01, num_tokens: int = 11) -> Record:
    gaps = [gap] * (num_tokens - 1)
    return Record(due, 0.0, ttft + sum(gaps), ttft, num_tokens, 5, gaps)


def bad(kind: str, detail: str = "") -> Record:
    return Record(0.0, 0.0, 0.5, error=kind, detail=detail)


def figures(*records: Record, slo: Slo = Slo()) -> LoadFigures:  # noqa: B008 - frozen
    return LoadFigures.of(LevelRun(LEVEL, records=list(records), cpu_shares=[0.2, 0.4]), slo)


def result(*records: Record) -> LevelResult:
    return LevelResult(LEVEL, 1, figures(*records), list(records))


def test_rates_count_what_succeeded_over_the_whole_time() -> None:
    found = figures(good(), good(due=1.8), bad("HTTP 429"))
    assert (found.num_succeeded, found.num_failed, found.num_out, found.num_in) == (2, 1, 22, 10)
    assert found.seconds == pytest.approx(2.0)
    assert found.requests_per_second == pytest.approx(1.0)
    assert found.tokens_per_second == pytest.approx(11.0)
    assert found.client_cpu == 0.4


def test_spreads_are_in_milliseconds() -> None:
    found = Summary.in_ms([0.1 * number for number in range(1, 102)])
    assert found is not None
    assert (found.average, found.p50, found.p95, found.p99) == pytest.approx((5100, 5100, 9600, 10000))
    assert found.highest == pytest.approx(10100)


def test_gaps_of_all_requests_count_alike() -> None:
    found = figures(good(gap=0.010, num_tokens=31), good(gap=0.050, num_tokens=11)).itl
    assert found is not None
    assert (found.average, found.p50) == pytest.approx((20.0, 10.0))


def test_good_requests_keep_both_promises() -> None:
    records = [good(), good(ttft=0.3), good(gap=0.03), bad("timeout")]
    found = figures(*records, slo=Slo(ttft=200, itl=20))
    assert (found.good_share, found.goodput) == (0.25, pytest.approx(0.25 * 4 / found.seconds))
    assert figures(*records, slo=Slo(ttft=200)).good_share == 0.5
    assert figures(*records).good_share is None


def test_a_request_is_judged_by_the_tokens_that_the_server_counted() -> None:
    """Events of five tokens each: ten milliseconds a token, though fifty between events."""
    record = Record(0.0, 0.0, 1.0, 0.1, 11, None, [0.05, 0.05])
    assert record.mean_gap == pytest.approx(0.01)


def test_failures_are_counted_by_kind_with_an_example() -> None:
    found = figures(bad("HTTP 429", "full"), bad("timeout", "slow"), bad("HTTP 429", "still full"))
    assert {kind: (each.count, each.example) for kind, each in found.failures.items()} == {
        "HTTP 429": (2, "full"),
        "timeout": (1, "slow"),
    }
    assert list(found.failures) == ["HTTP 429", "timeout"]


def test_nothing_measured_is_no_crash() -> None:
    found = figures(bad("cannot connect", "refused"))
    assert (found.ttft, found.itl, found.tokens_per_second) == (None, None, 0.0)
    lines = summary([result(bad("cannot connect", "refused"))])
    assert "2 at once: 1 × cannot connect, such as: refused" in lines


def test_a_client_that_may_have_been_the_limit_says_so() -> None:
    busy = LoadFigures.of(LevelRun(LEVEL, records=[good()], cpu_shares=[0.2, 0.97]), Slo())
    assert "busy 97% of the time" in remarks(LevelResult(LEVEL, 2, busy, [good()]))[0]
    assert remarks(result(good())) == []


def test_the_file_has_every_request() -> None:
    data = to_json(AROUND, ASKED, [result(good(), bad("timeout", "slow"))])
    (found,) = data["results"]
    assert (data["command"], data["server"], found["concurrency"], found["num_failed"]) == (
        "legato bench serve", {"url": "http://here"}, 2, 1,
    )  # fmt: skip
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert [request.get("error") for request in found["requests"]] == [None, "timeout"]


def test_the_tables_fit_110_columns() -> None:
    level = LoadLevel(concurrency=4096, num_requests=100_000)
    slow = [good(due=number / 1000, ttft=599.0, gap=60.0) for number in range(2000)]
    figures = LoadFigures.of(LevelRun(level, records=slow), Slo(ttft=600_000))
    text = summary([LevelResult(level, 8, figures, slow), result(good())])
    assert "599,000" in text and "4096 at once" in text
    assert max(map(len, text.splitlines())) <= 110


def test_progress_goes_by_what_ends_sooner() -> None:
    run = LevelRun(LoadLevel(concurrency=1, num_requests=10, duration=1e9), records=[good()] * 5)
    assert run.share == 0.5


# ---- who sends what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "processes"), [(LoadLevel(concurrency=5, num_requests=23), 2), (LEVEL, 1)])
def test_slots_share_all_requests_between_the_processes(level: LoadLevel, processes: int) -> None:
    slots = [list(slot) for number in range(processes) for slot in assignment(level, number, processes).slots()]
    assert len(slots) == level.concurrency
    assert sorted(number for slot in slots for number in slot) == list(range(level.num_requests or 0))
    assert max(map(len, slots)) - min(map(len, slots)) <= 1


def test_arrivals_are_the_same_however_many_processes_there_are() -> None:
    level = LoadLevel(rate=50.0, num_requests=400)
    alone = list(assignment(level, 0, 1).arrivals())
    shared = [arrival for number in range(3) for arrival in assignment(level, number, 3).arrivals()]
    assert sorted(shared) == alone
    assert alone[-1][1] == pytest.approx(400 / 50, rel=0.2)


def test_lengths_vary_by_the_share_that_was_asked_for() -> None:
    jobs = [WORK.request(number) for number in range(200)]
    lengths = {job.input_len for job in jobs if job.input_len is not None}
    assert (min(lengths), max(lengths)) == (50, 150)
    assert all(len(str(job.prompt).split()) == job.input_len for job in jobs)
    assert {job.output_len for job in jobs} == {7}
    assert WORK.request(3) == WORK.request(3) != WORK.request(4)


@pytest.mark.parametrize(
    ("level", "wanted", "expected"),
    [
        (LoadLevel(concurrency=1), 4, 1),
        (LoadLevel(concurrency=500), 3, 3),
        (LoadLevel(concurrency=8), None, 1),
        (LoadLevel(rate=1), 2, 2),
    ],
)
def test_there_are_as_many_processes_as_make_sense(level: LoadLevel, wanted: int | None, expected: int) -> None:
    assert num_processes(level, wanted) == expected


WORK = RequestSource(0, Length(100, 0.5), Length(7), ["a", "b"])


def assignment(level: LoadLevel, number: int, processes: int) -> Assignment:
    return Assignment(None, WORK, level, number, processes)  # type: ignore[arg-type]  # nothing is sent
