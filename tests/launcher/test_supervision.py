"""Groups of processes that are restarted together."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import pytest

from legato.common import restarts
from legato.launcher.processes import Child, ChildFailed, ProcessCommand, Supervisor
from legato.launcher.supervision import ProcessGroup

LIVING = [sys.executable, "-c", "import time; time.sleep(60)"]


class ShortOfProcesses(Supervisor):
    """After the first start of both, the second process cannot be started for some attempts."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self._num_failures = num_failures
        self._num_started = 0

    def start(self, command: ProcessCommand) -> Child:
        self._num_started += 1
        if self._num_started > 2 and command.name == "shard-1" and self._num_failures:
            self._num_failures -= 1
            raise ChildFailed("cannot start shard-1: Resource temporarily unavailable")
        return super().start(command)


@pytest.mark.parametrize(("num_failures", "is_restarted"), [(2, True), (3, False)])
def test_processes_that_cannot_be_started_are_tried_again_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_failures: int, is_restarted: bool
) -> None:
    """The memory that a shard was killed for may be missing for its successor, too, for a moment."""
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.01)
    caplog.set_level(logging.INFO)

    async def commands() -> list[ProcessCommand]:
        return [ProcessCommand(f"shard-{rank}", LIVING, dict(os.environ)) for rank in range(2)]

    async def main() -> None:
        with ShortOfProcesses(num_failures) as supervisor:
            group = ProcessGroup("the shards", commands, supervisor, max_restarts=3)
            await group.start()
            group.is_ready = True
            group.children[0].kill()
            assert await group.restart(await group.first_exit()) is is_restarted
            if is_restarted:
                running = [child.name for child in supervisor.children if child.is_running]
                assert running == ["shard-0", "shard-1"], "a process of a start that failed is left"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert caplog.text.count("cannot start shard-1: Resource temporarily unavailable") == num_failures
