"""One answer for many who ask."""

from __future__ import annotations

import asyncio

import pytest

from legato.router.monitoring.shared_answer import INTERVAL, SharedAnswer


class Collector:
    """Each answer is the number of those before it, and takes a moment."""

    def __init__(self) -> None:
        self.num_begun = 0

    async def __call__(self) -> bytes:
        number, self.num_begun = self.num_begun, self.num_begun + 1
        await asyncio.sleep(0.02)
        if number == 1:
            raise OSError("it cannot be made")
        return b"%d" % number


def test_all_who_ask_at_once_get_one_answer_and_who_asks_later_a_new_one() -> None:
    async def main() -> None:
        collector = Collector()
        shared = SharedAnswer(collector)
        first = [asyncio.create_task(shared()) for _ in range(50)]
        await asyncio.sleep(0.01)
        assert collector.num_begun == 1
        later = asyncio.create_task(shared())  # what has begun may miss what it wants to know
        assert await asyncio.gather(*first) == [b"0"] * 50
        with pytest.raises(OSError, match="it cannot be made"):
            await later
        assert await shared() == b"2"

    asyncio.run(main())


def test_however_often_they_ask_answers_are_made_a_few_times_a_second() -> None:
    async def main() -> None:
        collector, seconds = Collector(), 5.5 * INTERVAL
        shared = SharedAnswer(collector)

        async def ask_again_and_again() -> None:
            while True:
                await asyncio.gather(shared(), return_exceptions=True)

        asking = [asyncio.create_task(ask_again_and_again()) for _ in range(20)]
        await asyncio.sleep(seconds)
        assert 2 <= collector.num_begun <= seconds / INTERVAL + 1
        for each in asking:
            each.cancel()

    asyncio.run(main())


def test_one_who_goes_away_does_not_end_the_answer_of_others() -> None:
    async def main() -> None:
        shared = SharedAnswer(Collector())
        gone, waiting = asyncio.create_task(shared()), asyncio.create_task(shared())
        await asyncio.sleep(0.01)
        gone.cancel()
        assert await waiting == b"0"

    asyncio.run(main())
