"""benchmarks/bound.py: sums that can be done by hand, and a bound that steps cannot get around."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bound import Device, seconds, summary
from legato.benchmark.engine.workloads import Workload, make_workloads

# A step takes 10 ms or more.
FREE_CACHE = Device(rows_per_second=1000, read_bytes=10, bandwidth=1000, kv_bytes=0, head=0)


def workload(*requests: tuple[int, int]) -> Workload:
    return Workload("one", [[7] * length for length, _ in requests], [new for _, new in requests])


def test_one_request_reads_the_weights_for_every_token() -> None:
    assert seconds(workload((5, 4)), FREE_CACHE, 100) == (pytest.approx(4 * 0.010), 4)


def test_rows_take_longer_than_the_weights_once_they_are_many() -> None:
    assert seconds(workload((100, 1)), FREE_CACHE, 100) == (pytest.approx(0.100), 1)
    assert seconds(workload((100, 1)), FREE_CACHE, 40) == (pytest.approx(0.100), 3)  # 40, 40 and 20


def test_decodes_run_beside_the_prompts_of_others() -> None:
    """The second prompt is computed beside the first one's decodes: 20, then 1 + 20, then 1."""
    taken, steps = seconds(workload((20, 3), (20, 1)), FREE_CACHE, 21)
    assert steps == 3
    assert taken == pytest.approx(0.021 + 0.020 + 0.010)


def test_every_decode_reads_its_own_context() -> None:
    device = Device(rows_per_second=1e9, read_bytes=0, bandwidth=1000, kv_bytes=1, head=0)
    # Three decodes after the prompt, which look back on 5, 6 and 7 tokens.
    assert seconds(workload((5, 4)), device, 100)[0] == pytest.approx((5 + 6 + 7) / 1000, rel=1e-3)


def test_rows_that_sample_are_multiplied_by_the_head_as_well() -> None:
    device = replace(FREE_CACHE, head=0.5)
    # A prompt of which the last row samples, then 30 rows that all do.
    assert seconds(workload((100, 1)), device, 100)[0] == pytest.approx(0.1005)
    assert seconds(workload(*[(1, 2)] * 30), device, 100)[0] == pytest.approx(2 * 0.045)


def test_smaller_steps_are_never_faster() -> None:
    device = Device(43_000, 15e9, 4.3e12, 131_072, 0.075)
    (mixed,) = make_workloads(["G4"], 4, 1000)
    taken = [seconds(mixed, device, size)[0] for size in (8192, 2048, 1024, 512)]
    assert taken == sorted(taken)


def test_the_summary_has_a_line_for_each() -> None:
    lines = summary(make_workloads(["G1", "G2"], 8, 1000), FREE_CACHE, 2048).splitlines()
    assert [line.split(":")[0] for line in lines] == ["G1", "G2"]
