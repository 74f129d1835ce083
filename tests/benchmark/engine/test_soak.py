"""`legato bench engine --duration`: it repeats, it reads, and growth is an error."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from legato.benchmark.engine.cli import benchmark, summary, to_json
from legato.benchmark.engine.soak import MIB, MemoryUsage, Soak, process_behind, resident_bytes, soak, wait_for_captures
from legato.benchmark.options import EngineOptions
from legato.benchmark.shard import running
from tests.benchmark.fake_shard import FakeService, listening


@dataclass
class FakeTime:
    """In place of the modules `time` and `asyncio`: time passes where somebody sleeps."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in ("time", "asyncio"):
        monkeypatch.setattr(f"legato.benchmark.engine.soak.{module}", fake)
    return fake


def readings(*hosts: int, duration: float = 100.0, blocks: int = 0) -> Soak:
    """Evenly over the time, in MiB."""
    step = duration / len(hosts)
    usages = [MemoryUsage((i + 1) * step, host * MIB, None, blocks) for i, host in enumerate(hosts)]
    return Soak(duration, usages)


def test_memory_that_stays_is_no_problem() -> None:
    assert readings(1000, 1010, 1005, 1020).problems == []


def test_memory_that_grows_is_one() -> None:
    (problem,) = readings(1000, 1100, 1200, 1300).problems
    assert problem == "host memory grew from 1000 to 1300 MiB"


def test_growth_during_warm_up_is_not_judged() -> None:
    assert readings(400, 1000, 1000, 1000, 1000, 1000, 1000, 1000).problems == []


def test_growth_within_the_tolerance_is_not_judged() -> None:
    assert readings(100, 160).problems == []


def test_a_large_shard_may_grow_no_more_than_a_small_one() -> None:
    assert readings(70_000, 70_000, 70_060).problems == []
    assert readings(70_000, 70_000, 70_070).problems == ["host memory grew from 70000 to 70070 MiB"]


@pytest.mark.parametrize(
    ("answers", "asked"),
    [([0], 1), ([3, 2, 1, 0], 4), ([3, 2, 2, 1, 0], 5)],
    ids=["nothing to capture", "one at a time", "a slow one"],
)
def test_the_work_begins_once_the_shard_has_its_graphs(fake_time: FakeTime, answers: list[int], asked: int) -> None:
    left = iter(answers)

    async def num_uncaptured() -> int:
        return next(left)

    asyncio.run(wait_for_captures(num_uncaptured, patience=0.2))
    assert len(answers) - len(list(left)) == asked


def test_a_shard_that_captures_nothing_is_not_waited_for(fake_time: FakeTime) -> None:
    calls = 0

    async def num_uncaptured() -> int:
        nonlocal calls
        calls += 1
        return 7

    asyncio.run(wait_for_captures(num_uncaptured, patience=1.0))
    assert calls > 2 and 1.0 <= fake_time.now < 1.2


def test_a_block_that_is_never_given_back_is_a_problem() -> None:
    assert readings(1, 1, blocks=3).problems == ["3 KV blocks were never freed"]


def test_the_work_is_repeated_until_the_time_is_over(fake_time: FakeTime, tmp_path: Path) -> None:
    calls = 0

    async def work() -> list[int]:
        nonlocal calls
        calls += 1
        await fake_time.sleep(0.25)
        return [0, 0]

    result = asyncio.run(soak(work, 1.0, str(tmp_path / "nobody")))
    assert calls == len(result.usages) == 4
    assert result.end.seconds == 1.0 and result.end.host is None


def test_the_process_behind_a_socket_is_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        assert process_behind(str(tmp_path / "socket")) == os.getpid()
    assert (resident_bytes(os.getpid()) or 0) > MIB


def test_a_soak_of_a_shard_reports_every_round(tmp_path: Path) -> None:
    service = FakeService(f"{tmp_path}/shard-0")
    options = EngineOptions(scale=64, duration=1, max_rows=8, max_total_tokens=64, step_tokens=32)

    async def conversation():  # type: ignore[no-untyped-def]
        async with listening(service):
            return await benchmark(options, ["G4"], running(service.path), started=0.0)

    results = asyncio.run(conversation())
    assert results.soak is not None and results.soak.problems == []
    assert len(results.workloads[0].runs) == len(results.soak.usages) > 1
    assert "Soak:" in summary(results)
    assert to_json({}, options, results)["soak"]["usages"][0]["blocks"] == 0


@pytest.mark.parametrize("blocks", [0, 2])
def test_the_worst_round_counts_for_blocks(blocks: int) -> None:
    soaked = Soak(1.0, [MemoryUsage(0.5, None, None, blocks), MemoryUsage(1.0, None, None, 0)])
    assert bool(soaked.problems) == bool(blocks)
