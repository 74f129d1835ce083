"""benchmarks/timeline.py: steps and gaps out of a recording, and a recorder that begins and ends when it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.timeline import FIRST_KERNEL, Activity, Recorder, cut_into_steps, picture


def activities(*starts: float) -> list[Activity]:
    """Steps of a copy, the first kernel and a matrix product, 30 µs long all together."""
    kernels = (("Memcpy HtoD", 0), (FIRST_KERNEL, 10), ("nvjet_gemm", 20))
    return [Activity(name, start + offset, 10) for start in starts for name, offset in kernels]


def test_a_step_begins_with_the_copy_before_its_first_kernel() -> None:
    timeline = cut_into_steps(1, activities(-500, 0, 100, 140, 200, 300))
    assert [[activity.start for activity in step] for step in timeline.steps] == [
        [100, 110, 120],
        [140, 150, 160],
        [200, 210, 220],
    ]
    assert timeline.gaps == [10, 30]


def test_figures_and_picture_name_the_gaps() -> None:
    timeline = cut_into_steps(8, activities(-500, 0, 100, 140, 200, 300))
    figures = timeline.figures()
    assert (figures["batch"], figures["gap_us_p50"], figures["gap_us_max"]) == (8, 20, 30)
    assert figures["busy_us_by_kind"]["matrix product"] == 10
    assert "batch 8" in picture([timeline]) and "most 30 µs" in picture([timeline])


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    cpu = [torch.profiler.ProfilerActivity.CPU]  # also where there is a GPU
    monkeypatch.setattr("benchmarks.timeline._profiler", lambda: torch.profiler.profile(activities=cpu))
    return Recorder(tmp_path / "wanted", tmp_path / "trace.json", num_steps=3)


def step(recorder: Recorder, number: int) -> None:
    recorder.before_step()
    with torch.profiler.record_function(f"step {number}"):
        torch.ones(3).sum()


def test_only_steps_after_the_wish_are_recorded_and_only_so_many(recorder: Recorder, tmp_path: Path) -> None:
    step(recorder, 0)
    (tmp_path / "wanted").touch()
    for number in range(1, 8):
        assert (tmp_path / "trace.json").exists() == (number > 4)
        step(recorder, number)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted(event["name"] for event in events if event["name"].startswith("step ")) == [
        "step 1",
        "step 2",
        "step 3",
    ]
