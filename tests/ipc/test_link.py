from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import msgspec

from legato.ipc.link import TURN_SECONDS, Link, decoder_for


class Number(msgspec.Struct, tag="number"):
    value: int


async def pair(on_message: Callable[[Number], None], on_lost: Callable[[], None] = lambda: None) -> tuple[Link, Link]:
    """A link that sends and one that receives."""
    ours, theirs = socket.socketpair()
    sender = Link(decoder_for(Number), lambda message: None, lambda: None)
    receiver = Link(decoder_for(Number), on_message, on_lost)
    await sender.open(ours)
    await receiver.open(theirs)
    return sender, receiver


def test_messages_arrive_in_order_however_they_are_cut_into_frames() -> None:
    async def run() -> list[int]:
        seen: list[int] = []
        sender, _ = await pair(lambda message: seen.append(message.value))
        for value in range(3000):
            sender.send(Number(value))
            if value % 7 == 0:
                await asyncio.sleep(0)
        while len(seen) < 3000:
            await asyncio.sleep(0.001)
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 10)) == list(range(3000))


def test_others_have_their_turn_while_much_has_arrived() -> None:
    """Forty frames of work for as long as a turn lasts, each: nobody waits for all of them."""

    async def run() -> int:
        seen: list[int] = []

        def work(message: Number) -> None:
            time.sleep(TURN_SECONDS)
            seen.append(message.value)

        sender, _ = await pair(work)
        for value in range(40):
            sender.send(Number(value))
            sender.flush()
        most = 0
        while len(seen) < 40:
            before = len(seen)
            await asyncio.sleep(0)
            most = max(most, len(seen) - before)
        assert seen == list(range(40))
        return most

    assert asyncio.run(asyncio.wait_for(run(), 60)) <= 2


def test_what_has_arrived_is_handled_before_the_end_is_told() -> None:
    async def run() -> list[object]:
        seen: list[object] = []
        ended = asyncio.Event()

        def lost() -> None:
            seen.append("lost")
            ended.set()

        def work(message: Number) -> None:
            time.sleep(0.002)
            seen.append(message.value)

        sender, _ = await pair(work, lost)
        for value in range(10):
            sender.send(Number(value))
            sender.flush()
        sender.close()
        await ended.wait()
        await asyncio.sleep(0.02)
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 10)) == [*range(10), "lost"]
