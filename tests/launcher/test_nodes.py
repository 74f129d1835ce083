"""Launchers of several machines: they gather, are told to start, and notice when one of them is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from legato.cluster.connecting import LinkTarget
from legato.common.sockets import free_port
from legato.launcher.nodes import STOPPED, Assembly, NodeHub, NodeLink, NodeRefused, ServerStopped, join

Joining = asyncio.Task[tuple[NodeLink, Assembly]]
KEY = b"0123456789abcdef"
ABOUT = {"version": "1", "options": "--nnodes=3 --num-shard=1"}


class Gathering:
    """The first machine, and the others."""

    def __init__(self) -> None:
        self.port = free_port()
        self.hub = NodeHub("127.0.0.1", self.port, KEY, 3, ABOUT)
        self.lost: list[str] = []
        self.hub.on_lost = self.lost.append

    def join(
        self, rank: int, about: dict[str, str] = ABOUT, key: bytes = KEY, address: str = ""
    ) -> asyncio.Task[tuple[NodeLink, Assembly]]:
        target = LinkTarget("127.0.0.1", self.port, key, address or f"127.0.0.{rank + 1}")
        return asyncio.ensure_future(join(target, rank, about))


def gathered(test: Callable[[Gathering], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            gathering = Gathering()
            try:
                await test(gathering)
            finally:
                await gathering.hub.stop()

    asyncio.run(run())


def test_all_start_one_group_when_the_last_machine_is_there() -> None:
    async def test(gathering: Gathering) -> None:
        first = gathering.join(1)
        assembling = asyncio.ensure_future(gathering.hub.assemble())
        await asyncio.sleep(0.2)
        assert not assembling.done() and not first.done()
        second = gathering.join(2)
        assembly = await assembling
        assert assembly.addresses == ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        assert (await first)[1] == (await second)[1] == assembly

    gathered(test)


def test_a_machine_that_ends_is_named_with_its_reason_and_may_join_again() -> None:
    async def test(gathering: Gathering) -> None:
        joins = [gathering.join(rank) for rank in (1, 2)]
        before = await gathering.hub.assemble()
        links = [(await each)[0] for each in joins]
        await links[0].close("shard-1 was killed by SIGKILL")
        while not gathering.lost:
            await asyncio.sleep(0.01)
        assert gathering.lost == ["lost machine 1 at 127.0.0.2: shard-1 was killed by SIGKILL"]
        assert gathering.hub.loss == gathering.lost[0]
        again = gathering.join(1)
        assembling = asyncio.ensure_future(gathering.hub.assemble())
        assert await links[1].ended == "the shards are started again"
        other = gathering.join(2)
        after = await assembling
        assert gathering.hub.loss is None
        assert after.group != before.group
        assert (await again)[1] == (await other)[1] == after

    gathered(test)


def test_a_machine_that_joins_again_before_its_end_was_noticed_ends_the_group() -> None:
    async def test(gathering: Gathering) -> None:
        joins = [gathering.join(rank) for rank in (1, 2)]
        await gathering.hub.assemble()
        await asyncio.gather(*joins)
        gathering.join(2)
        while not gathering.lost:
            await asyncio.sleep(0.01)
        assert gathering.lost == ["lost machine 2 at 127.0.0.3: this machine has joined again"]

    gathered(test)


def test_of_two_machines_with_one_rank_the_second_waits_until_the_first_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They would otherwise end each other's group for ever."""

    async def test(gathering: Gathering) -> None:
        joins = [gathering.join(rank) for rank in (1, 2)]
        await gathering.hub.assemble()
        links = [(await each)[0] for each in joins]
        double = gathering.join(1, address="127.0.0.9")
        while "127.0.0.9 has to wait: machine 1 is 127.0.0.2 already (--node-rank)" not in caplog.text:
            await asyncio.sleep(0.01)
        assert gathering.lost == [] and not double.done()
        await links[0].close("it ends")
        assembling = asyncio.ensure_future(gathering.hub.assemble())
        gathering.join(2)
        assert (await assembling).addresses == ("127.0.0.1", "127.0.0.9", "127.0.0.3")
        await double

    caplog.set_level(logging.INFO)
    gathered(test)


def test_the_end_of_the_server_reaches_all() -> None:
    async def test(gathering: Gathering) -> None:
        joins = [gathering.join(rank) for rank in (1, 2)]
        await gathering.hub.assemble()
        links = [(await each)[0] for each in joins]
        await gathering.hub.stop()
        assert [await link.ended for link in links] == [STOPPED, STOPPED]
        assert gathering.lost == []

    gathered(test)


def test_the_end_of_the_server_reaches_a_machine_that_waits_for_others() -> None:
    async def test(gathering: Gathering) -> None:
        waiting = gathering.join(1)
        while 1 not in gathering.hub._joined:
            await asyncio.sleep(0.01)
        await gathering.hub.stop()
        with pytest.raises(ServerStopped, match=STOPPED):
            await waiting

    gathered(test)


@pytest.mark.parametrize(
    ("rank", "about", "words"),
    [
        (1, ABOUT | {"version": "2"}, "version differs: here 1, there 2"),
        (1, ABOUT | {"options": "--nnodes=3 --num-shard=2"}, "options differ: here --num-shard=1, there --num-shard=2"),
        (3, ABOUT, "there is no machine 3 among 3"),
        (0, ABOUT, "there is no machine 0 among 3"),
    ],
)
def test_a_machine_that_was_started_otherwise_is_refused(rank: int, about: dict[str, str], words: str) -> None:
    async def test(gathering: Gathering) -> None:
        with pytest.raises(NodeRefused, match=words):
            await gathering.join(rank, about)

    gathered(test)


def test_a_machine_without_the_key_is_refused_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def test(gathering: Gathering) -> None:
        for _ in range(3):
            with pytest.raises(NodeRefused, match="--cluster-key"):
                await gathering.join(1, key=b"another key, just as long")

    with caplog.at_level(logging.WARNING):
        gathered(test)
    assert sum("wrong cluster key" in record.getMessage() for record in caplog.records) == 1


def test_a_machine_that_is_not_there_yet_is_waited_for() -> None:
    async def run() -> None:
        port = free_port()
        joining = asyncio.ensure_future(join(LinkTarget("127.0.0.1", port, KEY), 1, ABOUT))
        await asyncio.sleep(0.3)
        assert not joining.done()
        hub = NodeHub("127.0.0.1", port, KEY, 2, ABOUT)
        assembly = await asyncio.wait_for(hub.assemble(), 20)
        assert (await joining)[1] == assembly
        await hub.stop()

    asyncio.run(run())
