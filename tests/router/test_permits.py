"""Who is refused is told when to come back: as soon as permits are given back, and not all at the same time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest

from legato.router.permits import LONGEST_WAIT, PermitPool


@dataclass
class House:
    """A pool in simulated time: every request keeps its permit for `stay` seconds."""

    total: int
    stay: float
    now: float = 100.0
    _leaving: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PermitPool(self.total, lambda: self.now)

    def until(self, moment: float) -> None:
        while self._leaving and self._leaving[0] <= moment:
            self.now = heapq.heappop(self._leaving)
            self.pool.give_back(1)
        self.now = moment

    def ask(self) -> int | None:
        """Seconds until it makes sense to ask again, or None if there was a permit."""
        if not self.pool.try_take(1):
            return self.pool.refuse(1)
        heapq.heappush(self._leaving, self.now + self.stay)
        return None

    def fill(self, *, over: float) -> None:
        """Keep it full for so many seconds, with requests that come and go evenly."""
        begun = self.now
        for number in range(self.total):
            self.until(begun + number * self.stay / self.total)
            self.ask()
        while self.now < begun + over:
            self.until(self._leaving[0])
            self.ask()


@pytest.mark.parametrize(
    ("total", "stay", "expected"),
    [(4, 80.0, 20), (4, 20.0, 5), (10, 1.0, 1), (128, 10.0, 1), (2, 500.0, LONGEST_WAIT)],
)
def test_the_wait_is_what_a_permit_takes_to_come_back(total: int, stay: float, expected: int) -> None:
    house = House(total, stay)
    house.fill(over=4 * stay)
    told = house.ask()
    assert told is not None
    assert abs(told - expected) <= expected / 2
    assert 1 <= told <= LONGEST_WAIT


def test_those_who_are_refused_together_come_back_one_after_the_other() -> None:
    house = House(total=10, stay=20)  # a permit every two seconds
    house.fill(over=60)
    told = [house.ask() for _ in range(8)]
    assert told == sorted(told, key=lambda seconds: seconds or 0)
    assert told[0] in (1, 2, 3)
    assert told[-1] in range(14, 19)


def test_whoever_comes_back_when_told_finds_a_permit() -> None:
    """Forty at a full house, each of them comes when it was told to: hardly anybody has to come a third time."""
    house = House(total=10, stay=10)  # a permit every second
    house.fill(over=40)
    waiting: list[tuple[float, int]] = []
    num_refusals = 0
    for number in range(40):
        house.until(house.now + 0.01)
        if (told := house.ask()) is not None:
            heapq.heappush(waiting, (house.now + told, number))
            num_refusals += 1
    assert num_refusals >= 38
    again = 0
    while waiting:
        moment, number = heapq.heappop(waiting)
        house.until(max(house.now, moment))
        if (told := house.ask()) is not None:
            heapq.heappush(waiting, (house.now + told, number))
            again += 1
    assert again <= 4


def test_nobody_knows_at_first_and_the_guess_grows_while_nothing_happens() -> None:
    house = House(total=2, stay=1000)
    assert [house.ask(), house.ask()] == [None, None]
    assert [house.ask() for _ in range(50)] == [1] * 50
    house.until(house.now + 7.5)
    assert house.ask() == 8
    house.until(house.now + 900)
    assert house.ask() == LONGEST_WAIT


def test_how_fast_it_was_before_a_quiet_hour_does_not_count() -> None:
    house = House(total=2, stay=50)
    house.fill(over=200)
    house.until(house.now + 3600)
    assert [house.ask(), house.ask(), house.ask()] == [None, None, 1]


def test_whoever_wants_several_waits_for_several() -> None:
    house = House(total=10, stay=20)
    house.fill(over=60)
    assert house.pool.refuse(4) in range(6, 11)
