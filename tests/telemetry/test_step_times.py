from __future__ import annotations

import pytest

from legato.telemetry import step_times
from legato.telemetry.step_times import MAX_GROUPS, MAX_STEPS, StepGroup, StepTimes


def noted(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> StepTimes:
    clock = iter(times)
    monkeypatch.setattr(step_times.time, "monotonic", lambda: next(clock))
    steps = StepTimes()
    for _ in times:
        steps.add()
    return steps


def test_few_steps_have_a_group_each(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = noted(monkeypatch, [1.0, 2.0, 4.0, 8.0, 16.0])
    assert steps.after(2.5, 2) == [StepGroup(4.0, 1, 2.0), StepGroup(8.0, 1, 4.0)]
    assert steps.after(2.0, 0) == []


def test_many_steps_have_a_bounded_number_of_groups_and_no_slow_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.01 * number + (0.5 if number >= 700 else 0.0) for number in range(1000)]
    groups = noted(monkeypatch, times).after(times[0], 999)
    assert len(groups) == MAX_GROUPS and sum(group.num for group in groups) == 999
    assert max(group.longest_gap for group in groups) == pytest.approx(0.51)
    assert groups[-1].at == times[-1] and groups == sorted(groups)


def test_old_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [float(number) for number in range(3 * MAX_STEPS)]
    steps = noted(monkeypatch, times)
    assert len(steps._times) <= 2 * MAX_STEPS
    assert steps.after(0.0, 3)[-1].at > MAX_STEPS, "a request that is older gets what there is"
