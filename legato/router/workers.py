"""Starts, monitors, replaces and stops the HTTP workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from legato.common.errors import LegatoError
from legato.common.exits import signal_name
from legato.common.restarts import RestartBudget, TooManyRestarts
from legato.ipc import messages as msg
from legato.ipc.link import Link, decoder_for
from legato.router.port import Port
from legato.scheduling.adapters import AdapterInfo
from legato.telemetry.metrics import Figures, add_up

logger = logging.getLogger(__name__)

# Bytes that a worker may leave unread before it counts as hung. Those of a second are some hundred kilobytes.
MAX_UNREAD = 64 << 20
# Seconds for workers to say what they have counted. Of one that is busy for longer, the last report counts.
REPORT_PATIENCE = 1.0
# Seconds for which a worker may be silent until all have loaded. Later `monitoring/health` watches them.
START_SILENCE = 30.0
ASK_SECONDS = 1.0
# Seconds for a process to end once it has closed its link.
EXIT_PATIENCE = 5.0

_decoder = decoder_for(msg.ToScheduler)


class WorkerFailed(LegatoError):
    """A worker cannot begin."""


class WorkerProcess:
    """One process, as we see it. `loaded` and `serving` come one after the other, or fail when the process ends."""

    def __init__(self, number: int, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.figures: Figures = {}
        self.loaded: asyncio.Future[None] = loop.create_future()
        self.serving: asyncio.Future[None] = loop.create_future()
        self.lost = asyncio.Event()
        self._reported = asyncio.Event()
        self._port: Port | None = None
        self._failure: str | None = None
        # Since when it has not answered.
        self._asked_at: float | None = None
        self._link = Link(_decoder, self._on_message, self._on_lost)
        self._connection, theirs = socket.socketpair()
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        with theirs:
            fds = (theirs.fileno(), listener.fileno())
            # -P: the folder that the router was started in has no say in what is imported.
            words = [sys.executable, "-P", "-m", "legato.http.worker", *map(str, fds)]
            self._process = subprocess.Popen(words, pass_fds=fds, env=environment)

    async def load(self, setup: msg.WorkerSetup) -> None:
        await self._link.open(self._connection)
        self._link.send(setup)

    def serve(self, make_port: Callable[[Callable[[msgspec.Struct], None]], Port], serve: msg.Serve) -> None:
        self._port = make_port(self._link.send)
        self._link.send(serve)

    def ask(self, now: float) -> None:
        """For a sign of life, also while it loads."""
        self._link.send(msg.AskFigures())
        if self._asked_at is None:
            self._asked_at = now

    async def report(self) -> None:
        """Until `figures` are new."""
        self._reported.clear()
        self._link.send(msg.AskFigures())
        await self._reported.wait()

    def tell(self, state: msg.ServerState, now: float) -> None:
        """Answered with a sign of life."""
        self._link.send(state)
        if self._asked_at is None:
            self._asked_at = now

    def tell_adapters(self, adapters: list[AdapterInfo]) -> None:
        """One that does not serve yet learns of them with `Serve`."""
        if self._port is not None:
            self._link.send(msg.Adapters(adapters))

    def excuse(self) -> None:
        """What was not answered until now does not count."""
        self._asked_at = None

    def is_hung(self, now: float, timeout: float) -> bool:
        is_silent = self._asked_at is not None and now - self._asked_at > timeout
        return is_silent or self._link.num_buffered > MAX_UNREAD

    def drain(self) -> None:
        self._link.send(msg.Drain())

    def kill(self) -> None:
        self._process.kill()

    async def exit(self) -> str:
        """How the process ended, once it has. Whatever it had of the scheduler is given back at once."""
        await self.lost.wait()
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            code = await asyncio.to_thread(self._process.wait)
        if self._failure is not None:
            return self._failure
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"HTTP worker {self.number} {how}"

    def _on_message(self, message: msg.ToScheduler) -> None:
        match message:
            case msg.Loaded():
                self.loaded.set_result(None)
            case msg.Serving():
                self.serving.set_result(None)
            case msg.Alive():
                self._asked_at = None
            case msg.Failed(failure):
                self._failure = failure
            case msg.Report(figures):
                self.figures, self._asked_at = figures, None
                self._reported.set()
            case _:
                assert self._port is not None, "client messages come after Serve"
                self._port.receive(message)

    def _on_lost(self) -> None:
        if self._port is not None:
            self._port.close()
        self._reported.set()
        self.lost.set()


class Workers:
    """All of them, one for each listener."""

    def __init__(self, setup: msg.WorkerSetup, listeners: list[socket.socket], max_restarts: int = 0) -> None:
        self._setup = setup
        self._listeners = listeners
        self._workers: list[WorkerProcess] = []
        self._numbers = itertools.count()
        # The last figures of workers that died, so that no counter goes back.
        self._dead_figures: Figures = {}
        self._budget = RestartBudget(max_restarts)
        self._attach: Callable[[WorkerProcess, int], None] | None = None

    @property
    def count(self) -> int:
        return len(self._listeners)

    async def load(self) -> None:
        """Start all, and wait until they have what they need. WorkerFailed."""
        self._workers = [WorkerProcess(number, listener) for number, listener in enumerate(self._listeners)]
        for worker in self._workers:
            await worker.load(self._setup)
        await self._all([worker.loaded for worker in self._workers])

    async def serve(self, attach: Callable[[WorkerProcess, int], None]) -> None:
        """`attach` gives a worker its port; its number is unique over all workers ever started. WorkerFailed."""
        self._attach = attach
        for worker in self._workers:
            attach(worker, next(self._numbers))
        await self._all([worker.serving for worker in self._workers])

    async def _all(self, steps: list[asyncio.Future[None]]) -> None:
        exits = [asyncio.ensure_future(worker.exit()) for worker in self._workers]
        waiting: set[asyncio.Future[Any]] = set(steps)
        hung: list[WorkerProcess] = []
        while waiting and not hung and not any(each.done() for each in exits):
            done, _ = await asyncio.wait([*waiting, *exits], timeout=ASK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
            hung = [worker for worker in self._workers if worker.is_hung(time.monotonic(), START_SILENCE)]
            for worker in self._workers:
                worker.ask(time.monotonic())
        ended = [each.result() for each in exits if each.done()]
        if hung and not ended:
            ended = [f"HTTP worker {hung[0].number} gave no sign of life for {START_SILENCE:g} s while it started"]
        unfinished: list[asyncio.Future[Any]] = [*steps, *exits]
        for each in unfinished:
            each.cancel()
        if ended:
            raise WorkerFailed(ended[0])

    async def watch(self) -> None:
        """Replace workers that die, until that happens too often: TooManyRestarts."""
        await asyncio.gather(*(self._keep(place) for place in range(len(self._workers))))

    async def _keep(self, place: int) -> None:
        assert self._attach is not None, "they serve"
        while True:
            dead = self._workers[place]
            how = await dead.exit()
            self._dead_figures = add_up([self._dead_figures, dead.figures])
            worker = self._workers[place] = await self._successor(dead, how)
            await worker.load(self._setup)
            self._attach(worker, next(self._numbers))

    async def _successor(self, dead: WorkerProcess, how: str) -> WorkerProcess:
        was_ready = dead.serving.done()
        while True:
            delay = self._budget.spend(time.monotonic(), was_ready=was_ready)
            if delay is None:
                raise TooManyRestarts(f"{how}; it is not replaced, because {self._budget.described}")
            logger.error("%s: starting another", how)
            await asyncio.sleep(delay)
            try:
                return WorkerProcess(dead.number, self._listeners[dead.number])
            except OSError as error:  # memory, processes or descriptors have run out, perhaps for a moment
                how, was_ready = f"HTTP worker {dead.number} cannot be started: {error.strerror}", False

    async def drain(self, grace: float) -> None:
        """Let requests finish, for so many seconds."""
        for worker in self._workers:
            worker.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(worker.exit() for worker in self._workers)), grace)
        self.kill()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def tell(self, state: msg.ServerState, now: float) -> None:
        for worker in self._workers:
            worker.tell(state, now)

    def tell_adapters(self, adapters: list[AdapterInfo]) -> None:
        for worker in self._workers:
            worker.tell_adapters(adapters)

    def excuse(self) -> None:
        for worker in self._workers:
            worker.excuse()

    def kill_hung(self, now: float, timeout: float) -> None:
        for worker in self._workers:
            if worker.is_hung(now, timeout):
                logger.error("HTTP worker %d is hung (--hang-timeout %g): killing it", worker.number, timeout)
                worker.kill()

    async def figures(self) -> Figures:
        """What all workers have counted together."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(worker.report() for worker in self._workers)), REPORT_PATIENCE)
        return add_up([self._dead_figures, *(worker.figures for worker in self._workers)])
