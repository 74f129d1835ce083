"""Streams of a balancer that is busy: which of them wait for it, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from legato.http.connections.pacing import LONGEST_WAIT, WOKEN_PER_TURN, Pacing


def run(test: Callable[[Pacing, list[int]], Awaitable[None]]) -> None:
    """The list has the streams that were let go on."""

    async def main() -> None:
        async with asyncio.timeout(10):
            await test(Pacing(), [])

    asyncio.run(main())


def test_nothing_waits_for_a_balancer_that_does_not_say_what_it_has_read() -> None:
    async def test(pacing: Pacing, woken: list[int]) -> None:
        assert not pacing.waits(1000, partial(woken.append, 1))

    run(test)


def test_a_stream_waits_until_its_last_piece_was_read() -> None:
    async def test(pacing: Pacing, woken: list[int]) -> None:
        pacing.has_read(100)
        assert not pacing.waits(0, partial(woken.append, 0)), "it has no piece yet"
        assert not pacing.waits(100, partial(woken.append, 1))
        go_on = [partial(woken.append, number) for number in range(4)]
        assert pacing.waits(150, go_on[2]) and pacing.waits(151, go_on[3]) and pacing.waits(150, go_on[2])
        pacing.has_read(50)
        assert woken == [2]
        pacing.has_read(1)
        assert woken == [2, 3]
        await asyncio.sleep(2 * LONGEST_WAIT)
        assert woken == [2, 3]

    run(test)


def test_no_stream_waits_long() -> None:
    async def test(pacing: Pacing, woken: list[int]) -> None:
        pacing.has_read(1)
        for number in range(2):
            assert pacing.waits(10, partial(woken.append, number))
            await asyncio.sleep(LONGEST_WAIT + 0.05)
            assert woken == list(range(number + 1))

    run(test)


def test_those_that_came_later_wait_no_longer_than_others() -> None:
    """The time runs for whoever waits, also behind others that were let go on."""

    async def test(pacing: Pacing, woken: list[int]) -> None:
        pacing.has_read(1)
        assert pacing.waits(10, partial(woken.append, 1)) and pacing.waits(20, partial(woken.append, 2))
        pacing.has_read(9)
        assert woken == [1] and pacing.waits(30, partial(woken.append, 3))
        await asyncio.sleep(LONGEST_WAIT + 0.05)
        assert woken == [1, 2, 3]

    run(test)


def test_a_few_streams_go_on_in_each_turn() -> None:
    async def test(pacing: Pacing, woken: list[int]) -> None:
        pacing.has_read(1)
        for number in range(2 * WOKEN_PER_TURN + 1):
            assert pacing.waits(10, partial(woken.append, number))
        pacing.has_read(9)
        assert len(woken) == WOKEN_PER_TURN
        assert pacing.waits(20, partial(woken.append, -1))
        pacing.has_read(10)
        for _ in range(3):
            await asyncio.sleep(0)
        assert woken == [*range(2 * WOKEN_PER_TURN + 1), -1]

    run(test)


def test_nobody_is_woken_on_a_connection_that_is_gone() -> None:
    async def test(pacing: Pacing, woken: list[int]) -> None:
        pacing.has_read(1)
        assert pacing.waits(10, partial(woken.append, 1))
        pacing.close()
        await asyncio.sleep(2 * LONGEST_WAIT)
        assert woken == []

    run(test)
