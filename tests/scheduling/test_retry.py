"""A refused client is told when to retry: as soon as a slot is free, and not all clients at the same time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest

from legato.api.errors import Overloaded
from legato.http.concurrency import ConcurrencyLimit
from legato.scheduling.retry import LONGEST_WAIT


@dataclass
class Server:
    """A limit in simulated time: every request holds its slot for `stay` seconds."""

    total: int
    stay: float
    now: float = 100.0
    _leaving: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limit = ConcurrencyLimit(self.total, lambda: self.now)

    def until(self, moment: float) -> None:
        while self._leaving and self._leaving[0] <= moment:
            self.now = heapq.heappop(self._leaving)
            self.limit.release(1)
        self.now = moment

    def ask(self, count: int = 1) -> int | None:
        """Seconds until a retry is worth it, or None if there was a slot."""
        try:
            self.limit.take(count)
        except Overloaded as refused:
            return int(refused.headers["retry-after"])
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
def test_the_wait_is_the_time_until_a_slot_is_free(total: int, stay: float, expected: int) -> None:
    server = Server(total, stay)
    server.fill(over=4 * stay)
    told = server.ask()
    assert told is not None
    assert abs(told - expected) <= expected / 2
    assert 1 <= told <= LONGEST_WAIT


def test_clients_refused_together_retry_one_after_the_other() -> None:
    server = Server(total=10, stay=20)  # a slot every two seconds
    server.fill(over=60)
    told = [server.ask() for _ in range(8)]
    assert told == sorted(told, key=lambda seconds: seconds or 0)
    assert told[0] in (1, 2, 3)
    assert told[-1] in range(14, 19)


def test_a_client_that_retries_when_told_finds_a_slot() -> None:
    """Forty clients at a full server retry when told to: hardly any needs a third attempt."""
    server = Server(total=10, stay=10)  # a slot every second
    server.fill(over=40)
    waiting: list[tuple[float, int]] = []
    num_refusals = 0
    for number in range(40):
        server.until(server.now + 0.01)
        if (told := server.ask()) is not None:
            heapq.heappush(waiting, (server.now + told, number))
            num_refusals += 1
    assert num_refusals >= 38
    again = 0
    while waiting:
        moment, number = heapq.heappop(waiting)
        server.until(max(server.now, moment))
        if (told := server.ask()) is not None:
            heapq.heappush(waiting, (server.now + told, number))
            again += 1
    assert again <= 4


def test_without_finished_requests_the_estimate_grows_with_time() -> None:
    server = Server(total=2, stay=1000)
    assert [server.ask(), server.ask()] == [None, None]
    assert [server.ask() for _ in range(50)] == [1] * 50
    server.until(server.now + 7.5)
    assert server.ask() == 8
    server.until(server.now + 900)
    assert server.ask() == LONGEST_WAIT


def test_the_rate_before_an_idle_hour_does_not_count() -> None:
    server = Server(total=2, stay=50)
    server.fill(over=200)
    server.until(server.now + 3600)
    assert [server.ask(), server.ask(), server.ask()] == [None, None, 1]


def test_a_request_for_several_slots_waits_for_several() -> None:
    server = Server(total=10, stay=20)
    server.fill(over=60)
    assert server.ask(4) in range(6, 11)
