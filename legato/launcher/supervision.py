"""Supervises the processes of a server and restarts them: the shards together, the router alone.

    a shard ends    the others of its group are killed, all are started again; the router keeps its requests and replays
                    them on the new shards
    the router      is started again; the shards keep their weights, and clients have to ask again
    ends

Until the server was ready for the first time, a failure ends it: wrong options and broken files do not go away. A shard
that hangs while it loads may. A failure beyond `--max-restarts` ends the server, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from legato.common.heartbeat import BEAT_SECONDS
from legato.common.restarts import EXIT_NO_RESTART, RestartBudget
from legato.launcher.plan import RELAY, LaunchPlan
from legato.launcher.processes import KILL_SECONDS, Child, ChildFailed, ProcessCommand, Supervisor

logger = logging.getLogger(__name__)

RELAY_SECONDS = 1.0

# A stage of the start, and how much of it is done.
Tell = Callable[[str, float], None]


class ProcessGroup:
    """Processes that are started, killed and restarted together."""

    def __init__(
        self,
        name: str,
        commands: Callable[[], Awaitable[Sequence[ProcessCommand]]],
        supervisor: Supervisor,
        max_restarts: int,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`commands` are asked for at every start, and may be long in coming; `clean_up` removes what processes that
        were killed leave behind."""
        self.name = name
        self.children: list[Child] = []
        self.is_ready = False
        self._commands = commands
        self._supervisor = supervisor
        self._budget = RestartBudget(max_restarts)
        self._clean_up = clean_up

    async def start(self) -> None:
        """ChildFailed; those that were started are in `children`."""
        self.is_ready = False
        commands, self.children = await self._commands(), []
        for command in commands:
            self.children.append(self._supervisor.start(command))

    @property
    def is_complete(self) -> bool:
        """Whether all run; not between two attempts to start them."""
        return bool(self.children) and all(child.is_running for child in self.children)

    @property
    def exits(self) -> list[asyncio.Future[int]]:
        return [child.exited for child in self.children]

    async def first_exit(self) -> Child:
        await asyncio.wait(self.exits, return_when=asyncio.FIRST_COMPLETED)
        return first_cause([child for child in self.children if not child.is_running])

    async def restart(self, dead: Child) -> bool:
        """Kill what is left and start all, after a while if the last start failed. False: there was one restart too
        many, and nothing is started."""
        delay = self._delay(dead.describe_exit(), was_ready=self.is_ready)
        if delay is not None:
            dead.show_stderr()
        while delay is not None:
            for child in self.children:
                child.kill()
            if self.exits:
                await asyncio.wait(self.exits, timeout=KILL_SECONDS)
            await asyncio.sleep(delay)
            self._clean_up()
            try:
                await self.start()
                return True
            except ChildFailed as error:  # memory, processes or descriptors have run out, perhaps for a moment
                delay = self._delay(str(error), was_ready=False)
        return False

    def _delay(self, problem: str, *, was_ready: bool) -> float | None:
        """Seconds until the restart; None if there is none."""
        delay = self._budget.spend(time.monotonic(), was_ready=was_ready)
        if delay is None:
            logger.error("%s: not restarted, because %s", problem, self._budget.described)
        else:
            logger.error("%s: restarting %s%s", problem, self.name, f" in {delay:g} s" if delay else "")
        return delay


class ServerProcesses:
    """All of them. `startup` ends when the server is ready for the first time, `ready_again` when it is after a
    restart. Both get a function for the stages in between."""

    def __init__(
        self,
        supervisor: Supervisor,
        plan: LaunchPlan,
        max_restarts: int,
        hang_timeout: float,
        load_timeout: float,
        remove_sockets: Callable[[], None],
        startup: Callable[[Tell], Awaitable[None]],
        ready_again: Callable[[Tell], Awaitable[None]],
        shard_commands: Callable[[], Awaitable[Sequence[ProcessCommand]]] | None = None,
        waits: bool = False,
        machine_loss: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Without `shard_commands` the shards are those of the plan; with `waits` these wait for other machines.
        `machine_loss` says whether one of them was lost since."""
        self._supervisor = supervisor
        self._hang_timeout = hang_timeout
        self._load_timeout = load_timeout
        self._startup = startup
        self._ready_again = ready_again
        self._was_ready = False
        self._waits = waits
        self._machine_loss = machine_loss
        shards, router = shard_commands or _given(plan.shards), _given([plan.router])
        self.shards = ProcessGroup("the shards", shards, supervisor, max_restarts, remove_sockets)
        self.router = ProcessGroup("the router", router, supervisor, max_restarts)

    async def run(self) -> Child | None:
        """Until a stop signal, or until a process has ended that is not started again: that one."""
        if not self._waits:
            await self.shards.start()
        await self.router.start()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._supervisor.stopping.wait())]
        tasks += [asyncio.ensure_future(self._keep(group)) for group in (self.shards, self.router)]
        helpers = [asyncio.ensure_future(self._become_ready()), asyncio.ensure_future(self._watch_heartbeats())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.result() for task in tasks[1:] if task.done()]
        for task in (*helpers, *tasks):
            task.cancel()
        await asyncio.gather(*helpers, *tasks, return_exceptions=True)
        return None if self._supervisor.stopping.is_set() else first_cause(ended)

    async def _become_ready(self) -> None:
        await self._startup(self._tell)
        self._was_ready = self.shards.is_ready = self.router.is_ready = True

    async def _keep(self, group: ProcessGroup) -> Child:
        """Restart a group whenever one of its processes ends. Returns the process that ended for good."""
        if not group.children:
            await group.start()
        while True:
            dead = await group.first_exit()
            # A router that warms up shards for the first time ends with them. Machines come and go.
            may_restart = self._was_ready or (dead.is_hung and not dead.has_loaded) or await _has_lost_machine(group)
            is_final = not may_restart or dead.exited.result() == EXIT_NO_RESTART
            if is_final or not await group.restart(dead):
                return dead
            readiness = asyncio.ensure_future(self._log_ready(group))
            events: list[asyncio.Future[Any]] = [readiness, *group.exits]
            try:
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            finally:
                readiness.cancel()

    def lose_machine(self, reason: str) -> None:
        """What stands for the shards of other machines ends, and with it the group."""
        for child in self.shards.children:
            if child.name == RELAY and child.is_running:
                child.kill_hung(reason)

    def _tell(self, stage: str, progress: float) -> None:
        """The router answers on the port until the server is ready."""
        for child in self.router.children:
            child.tell(stage, progress)

    async def _watch_heartbeats(self) -> None:
        """Kill a router whose event loop has stopped, and a shard that gets nowhere while it loads. Shards that have
        loaded are watched by the router, which sees their steps."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            was_late, checked_at = now - checked_at > 2 * BEAT_SECONDS, now
            if was_late:  # we were stopped ourselves: beats may be waiting for us
                continue
            if (loss := self._machine_loss()) is not None:  # perhaps while the shards were being started
                self.lose_machine(loss)
            for child in silent(self.router.children, now - self._hang_timeout):
                if child.has_beaten:
                    child.kill_hung(f"no heartbeat for {self._hang_timeout:g} s (--hang-timeout)")
            if self._load_timeout:
                for child in silent(self.router.children, now - self._load_timeout):
                    if not child.has_beaten:
                        child.kill_hung(f"no heartbeat within {self._load_timeout:g} s of its start (--load-timeout)")
                # One of several is enough, the one that stopped first: the others wait for it, and end with it.
                for child in silent(self.shards.children, now - self._load_timeout)[:1]:
                    doing = "warming up" if child.has_loaded else "loading"
                    child.kill_hung(f"no progress in {doing} for {self._load_timeout:g} s (--load-timeout)")

    async def _log_ready(self, group: ProcessGroup) -> None:
        started = time.monotonic()
        await self._ready_again(self._tell)
        group.is_ready = True
        logger.info("Ready again %.1f s after a restart of %s", time.monotonic() - started, group.name)


async def _has_lost_machine(group: ProcessGroup) -> bool:
    """Shards may notice it a moment before what stands for those of other machines does."""
    relays = [child.exited for child in group.children if child.name == RELAY]
    if not relays:
        return False
    return bool((await asyncio.wait(relays, timeout=RELAY_SECONDS))[0])


def _given(commands: Sequence[ProcessCommand]) -> Callable[[], Awaitable[Sequence[ProcessCommand]]]:
    async def given() -> Sequence[ProcessCommand]:
        return commands

    return given


def silent(children: Sequence[Child], since: float) -> list[Child]:
    """Those that should have given a sign of life since then and have not, the most silent first."""
    beats = [(child.beat_at, child) for child in children if child.is_running and child.beat_at is not None]
    return [child for beat_at, child in sorted(beats, key=lambda each: each[0]) if beat_at < since]


def first_cause(ended: Sequence[Child]) -> Child:
    """Of several that have ended, one that was killed: shards that lose another end by themselves."""
    return min(ended, key=lambda child: child.exited.result() >= 0)
