"""The launcher of any machine but the first, when its shards cannot be started."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest

from legato.cluster.connecting import LinkTarget
from legato.common import restarts
from legato.common.sockets import free_port
from legato.launcher.follower import Follower
from legato.launcher.nodes import Assembly, NodeHub
from legato.launcher.processes import Child, ChildFailed, ProcessCommand, Supervisor
from tests.launcher.test_nodes import ABOUT, KEY


class ShortOfMemory(Supervisor):
    """The first process cannot be started."""

    def __init__(self) -> None:
        super().__init__()
        self.num_started = 0

    def start(self, command: ProcessCommand) -> Child:
        self.num_started += 1
        if self.num_started == 1:
            raise ChildFailed("cannot start shard-1: Cannot allocate memory")
        return super().start(command)


def commands(_: Assembly) -> list[ProcessCommand]:
    return [ProcessCommand("shard-1", [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))]


@pytest.mark.parametrize("delay", [0.01, 30.0])
def test_it_rejoins_after_a_while_and_a_signal_does_not_wait_for_that(
    monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", delay)

    async def main() -> None:
        port = free_port()
        hub, lost = NodeHub("127.0.0.1", port, KEY, 2, ABOUT), asyncio.Event()
        hub.on_lost = lambda _: lost.set()
        with ShortOfMemory() as supervisor:
            follower = Follower(supervisor, commands, lambda: None, max_restarts=3, load_timeout=0)
            running = asyncio.ensure_future(follower.run(LinkTarget("127.0.0.1", port, KEY), 1, ABOUT))
            await hub.assemble()
            await lost.wait()
            assert hub.loss == "lost machine 1 at 127.0.0.1: cannot start shard-1: Cannot allocate memory"
            if delay < 1:
                await hub.assemble()
                while supervisor.num_started < 2:
                    await asyncio.sleep(0.01)
            signalled = time.monotonic()
            supervisor.stopping.set()
            assert await running is None
            assert time.monotonic() - signalled < 5
            assert supervisor.num_started == (2 if delay < 1 else 1)
        await hub.stop()

    asyncio.run(asyncio.wait_for(main(), 30))
