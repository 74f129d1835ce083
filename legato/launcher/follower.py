"""The launcher on every machine but the first: it starts shards when the first machine says so, and kills them when
that machine, or the way to it, is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from legato.cluster.connecting import LinkTarget
from legato.common.heartbeat import BEAT_SECONDS
from legato.common.restarts import EXIT_NO_RESTART, RestartBudget
from legato.launcher.nodes import STOPPED, Assembly, NodeLink, ServerStopped, join
from legato.launcher.processes import KILL_SECONDS, Child, ChildFailed, ProcessCommand, Supervisor
from legato.launcher.supervision import first_cause, silent

logger = logging.getLogger(__name__)

# Seconds in which the reason of a shard's end may arrive from the first machine, whose shards may have ended before.
REASON_SECONDS = 0.5


class Follower:
    def __init__(
        self,
        supervisor: Supervisor,
        commands: Callable[[Assembly], Sequence[ProcessCommand]],
        remove_sockets: Callable[[], None],
        max_restarts: int,
        load_timeout: float,
    ) -> None:
        self.children: list[Child] = []
        self._supervisor = supervisor
        self._commands = commands
        self._remove_sockets = remove_sockets
        self._budget = RestartBudget(max_restarts)
        self._load_timeout = load_timeout

    async def run(self, target: LinkTarget, rank: int, about: dict[str, str]) -> Child | None:
        """Until the server stops, or a shard of this machine ends once too often: that one."""
        stopping = asyncio.ensure_future(self._supervisor.stopping.wait())
        try:
            while True:
                joining = asyncio.ensure_future(join(target, rank, about))
                await asyncio.wait([stopping, joining], return_when=asyncio.FIRST_COMPLETED)
                if not joining.done():
                    joining.cancel()
                    return None
                try:
                    link, assembly = joining.result()
                except ServerStopped:
                    return None
                try:
                    dead = await self._serve(link, assembly, stopping)
                except ChildFailed as error:  # memory, processes or descriptors have run out, perhaps for a moment
                    if not await self._may_go_on(str(error), stopping, was_ready=False):
                        raise
                    continue
                if stopping.done() or (link.ended.done() and link.ended.result() == STOPPED):
                    return None
                if dead is not None and not await self._may_replace(dead, stopping):
                    return dead
        finally:
            stopping.cancel()

    async def _serve(self, link: NodeLink, assembly: Assembly, stopping: asyncio.Future[Any]) -> Child | None:
        """One group. Returns the child that ended it; None if the first machine did, or a signal."""
        self.children = []
        try:
            for command in self._commands(assembly):
                self.children.append(self._supervisor.start(command))
        except ChildFailed as error:
            for child in self.children:
                child.kill()
            await link.close(str(error))
            raise
        logger.info("Starting shards", extra={"fields": {"num_shard": len(self.children), "group": assembly.group}})
        watching = asyncio.ensure_future(self._watch())
        exits = [child.exited for child in self.children]
        try:
            events: list[asyncio.Future[Any]] = [stopping, link.ended, *exits]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if not link.ended.done() and not stopping.done():
                await asyncio.wait([link.ended], timeout=REASON_SECONDS)
            if stopping.done() or (link.ended.done() and link.ended.result() == STOPPED):
                await link.close("this machine stops")
                return None
            dead = [child for child in self.children if not child.is_running]
            if not link.ended.done():
                cause = first_cause(dead)
                await link.close(cause.describe_exit())
                return cause
            logger.error("Lost machine 0: %s", link.ended.result())
            return None
        finally:
            watching.cancel()
            if not stopping.done() and not (link.ended.done() and link.ended.result() == STOPPED):
                for child in self.children:
                    child.kill()
                await asyncio.wait(exits, timeout=KILL_SECONDS)
                self._remove_sockets()

    async def _may_replace(self, dead: Child, stopping: asyncio.Future[Any]) -> bool:
        if dead.exited.result() == EXIT_NO_RESTART:
            return False
        may = await self._may_go_on(dead.describe_exit(), stopping, was_ready=dead.has_loaded)
        if may:
            dead.show_stderr()
        return may

    async def _may_go_on(self, problem: str, stopping: asyncio.Future[Any], *, was_ready: bool) -> bool:
        delay = self._budget.spend(time.monotonic(), was_ready=was_ready)
        if delay is None:
            logger.error("%s: not restarted, because %s", problem, self._budget.described)
            return False
        logger.error("%s: rejoining%s", problem, f" in {delay:g} s" if delay else "")
        if delay:
            await asyncio.wait([stopping], timeout=delay)
        return True

    async def _watch(self) -> None:
        """Kill a shard that gets nowhere while it loads."""
        while self._load_timeout:
            await asyncio.sleep(BEAT_SECONDS)
            for child in silent(self.children, time.monotonic() - self._load_timeout)[:1]:
                child.kill_hung(f"no progress in loading for {self._load_timeout:g} s (--load-timeout)")
