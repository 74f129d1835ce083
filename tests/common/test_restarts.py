"""How often, and how soon, a failed process is started again."""

from __future__ import annotations

from legato.common.restarts import LONGEST_DELAY, WINDOW, RestartBudget


def test_what_worked_is_restarted_at_once() -> None:
    budget = RestartBudget(10)
    assert [budget.spend(float(now), was_ready=True) for now in range(3)] == [0.0, 0.0, 0.0]


def test_what_never_worked_is_restarted_later_and_later() -> None:
    budget = RestartBudget(10)
    delays = [budget.spend(float(now), was_ready=False) for now in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_DELAY, LONGEST_DELAY, LONGEST_DELAY]
    assert budget.spend(8.0, was_ready=True) == 0.0
    assert budget.spend(9.0, was_ready=False) == 1.0


def test_one_failure_too_many_within_the_window_is_the_last() -> None:
    budget = RestartBudget(2)
    assert budget.spend(0.0, was_ready=True) == 0.0
    assert budget.spend(1.0, was_ready=True) == 0.0
    assert budget.spend(2.0, was_ready=True) is None
    assert budget.spend(WINDOW, was_ready=True) == 0.0, "the first failure is outside the window"
    assert budget.spend(WINDOW + 0.5, was_ready=True) is None


def test_none_are_allowed() -> None:
    assert RestartBudget(0).spend(0.0, was_ready=True) is None
