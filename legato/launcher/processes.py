"""Child processes: started in groups of their own, their output relayed, stopped in order, never left behind.

Everything happens on one event loop: pipes and signals wake it, nothing polls and there are no threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from legato.common.errors import LegatoError
from legato.common.logging import parse

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Enough for a long traceback.
KEPT_LINES = 400
LONGEST_LINE = 1 << 20
# A killed process may need a moment in the kernel, above all with a GPU to hand back.
KILL_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


class ChildFailed(LegatoError):
    """A program that the launcher started has ended when it should not."""


@dataclass(frozen=True)
class Command:
    """A program to start. `shows_stderr` lets it draw on our stderr, for a download with a progress bar."""

    name: str
    words: Sequence[str]
    environ: dict[str, str]
    shows_stderr: bool = False


class Child:
    """A running program. Its stdout flows into our log; the end of its stderr is kept for when it fails."""

    def __init__(self, command: Command) -> None:
        self.name = command.name
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stderr: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            self._process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if command.shows_stderr else subprocess.PIPE,
                env=command.environ,
                # Ctrl-C in a terminal reaches the launcher alone, which stops the others in order.
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError as error:
            raise ChildFailed(f"cannot start {command.words[0]}: {error.strerror}") from None
        takers = [(self._process.stdout, self._take_stdout), (self._process.stderr, self._take_stderr)]
        self._pipes = [_Lines(pipe, take) for pipe, take in takers if pipe is not None]

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    def reap(self) -> None:
        """Notice the end of the process, after everything it has said and with everything it has started."""
        if self.is_running and (code := self._process.poll()) is not None:
            self._signal_group(signal.SIGKILL)
            for pipe in self._pipes:
                pipe.finish()
            self.exited.set_result(code)

    def terminate(self) -> None:
        """Ask the process to end; it tells its own children."""
        if self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """End the process and everything it has started."""
        if self.is_running:
            self._signal_group(signal.SIGKILL)

    def describe_exit(self) -> str:
        """`shard-0 exited with code 1: the last line it wrote to stderr`"""
        code = self.exited.result()
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
        last = next((line.strip() for line in reversed(self.stderr) if line.strip()), "")
        return f"{self.name} {how}" + (f": {last.removeprefix('error: ')}" if last else "")

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _take_stdout(self, line: str) -> None:
        if record := parse(line):
            # Shards of one model call themselves alike; our name for the child has its rank.
            record.program = self.name
            logging.getLogger().handle(record)
        elif line.strip():
            logger.info("%s", line, extra={"program": self.name})

    def _take_stderr(self, line: str) -> None:
        self.stderr.append(line)
        logger.debug("%s", line, extra={"program": self.name})


class Supervisor:
    """Starts children, hears signals, and knows who has ended. A context: signals are ours inside it."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = asyncio.Event()
        self.impatient = False

    def __enter__(self) -> Supervisor:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP on purpose.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.kill()
        loop = asyncio.get_running_loop()
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            loop.remove_signal_handler(number)

    def start(self, command: Command) -> Child:
        child = Child(command)
        self.children.append(child)
        return child

    async def first_exit(self, *children: Child) -> Child | None:
        """The first of the children that ends, or None when a signal asks us to stop."""
        asked = asyncio.ensure_future(self.stopping.wait())
        events: list[asyncio.Future[Any]] = [asked, *(child.exited for child in children)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self.stopping.is_set():
            return None
        # Of several one that was killed: shards that lose another end on their own, but not by a signal.
        return min((child for child in children if not child.is_running), key=lambda child: child.exited.result() >= 0)

    async def stop(self, *children: Child, grace: float) -> None:
        """End the children: they get `grace` seconds to do it themselves."""
        for child in children:
            child.terminate()
        await asyncio.wait([child.exited for child in children], timeout=grace)
        for child in children:
            if child.is_running:
                logger.warning("%s has not stopped within %g s: killing it", child.name, grace)
                child.kill()
        await asyncio.wait([child.exited for child in children], timeout=KILL_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stopping.is_set() and number == signal.SIGINT:
            self.impatient = True
            logger.warning("Interrupted again: killing everything")
            for child in self.children:
                child.kill()
        elif not self.stopping.is_set():
            logger.info("Received %s: stopping", number.name)
            self.stopping.set()

    def _reap(self) -> None:
        for child in self.children:
            child.reap()


class _Lines:
    """Cuts what comes out of a pipe into lines, as it comes."""

    def __init__(self, pipe: IO[bytes], take: Callable[[str], None]) -> None:
        self._pipe = pipe
        self._take = take
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    def finish(self) -> None:
        """Take what is in the pipe now. Not until its end: a grandchild may hold it open."""
        while not self._pipe.closed and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        """Take one portion; False when there is none."""
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line.decode(errors="replace").rstrip())
        return True

    def _close(self) -> None:
        if self._pipe.closed:
            return
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._rest:
            self._take(self._rest.decode(errors="replace").rstrip())


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before its program: tie its life to ours, so that nothing survives a killed launcher."""
    if sys.platform != "linux":
        return None
    # Loaded here, because between fork and exec there should be as little Python as possible.
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
