"""Child processes: each in its own process group, output relayed to the log, stopped in order, never orphaned.

Everything runs on one event loop, driven by pipes and signals: no polling, no threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from legato.common import heartbeat as heartbeats
from legato.common.errors import LegatoError
from legato.common.exits import PR_SET_PDEATHSIG, report, signal_name
from legato.common.logging import parse

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Lines of stderr to keep: enough for a long traceback.
KEPT_LINES = 400
MAX_LINE_BYTES = 1 << 20
# The kernel may take a while to release the resources of a killed process, above all GPU memory.
KILL_SECONDS = 10.0
# Signals within this time are one: a service manager, or `timeout`, signals a process and its group.
SAME_SIGNAL_SECONDS = 1.0


class ChildFailed(LegatoError):
    """A child process exited unexpectedly or could not be started."""


@dataclass(frozen=True)
class ProcessCommand:
    """A process to start. With `shows_stderr` it shares our stderr, for the progress bar of a download."""

    name: str
    words: Sequence[str]
    environ: dict[str, str]
    shows_stderr: bool = False
    # Whether it sends heartbeats (`common/heartbeat.py`).
    beats: bool = False


class Child:
    """A running process. Its stdout goes to our log; the end of its stderr is kept for the error message."""

    def __init__(self, command: ProcessCommand) -> None:
        self.name = command.name
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stderr: deque[str] = deque(maxlen=KEPT_LINES)
        # When it last gave a sign of life, or was started; None while it need not give any.
        self.beat_at: float | None = time.monotonic() if command.beats else None
        # Whether it gave one, whether it was done with loading once, and why it was killed if it hung.
        self.has_beaten = self.has_loaded = False
        self._hung: str | None = None
        ours = theirs = None
        try:
            ours, theirs = socket.socketpair() if command.beats else (None, None)
            heartbeat = {} if theirs is None else {heartbeats.VARIABLE: str(theirs.fileno())}
            self._process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if command.shows_stderr else subprocess.PIPE,
                env=command.environ | heartbeat,
                pass_fds=() if theirs is None else (theirs.fileno(),),
                # Ctrl-C in a terminal reaches only the launcher, which stops the children in order.
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            if ours is not None:
                ours.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise ChildFailed(f"cannot start {command.words[0]}: {reason}") from None
        finally:
            if theirs is not None:
                theirs.close()
        # Both ways: beats come, and stages of the start go.
        self._heart = None if ours is None else os.fdopen(ours.detach(), "r+b", 0)
        takers: list[tuple[IO[bytes] | None, Callable[[str], None]]] = [
            (self._process.stdout, self._take_stdout),
            (self._process.stderr, self._take_stderr),
            (self._heart, self._take_beat),
        ]
        self._pipes = [_PipeReader(pipe, take) for pipe, take in takers if pipe is not None]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    def reap(self) -> None:
        """If the process has exited, read the rest of its output and kill the rest of its group."""
        if self.is_running and (code := self._process.poll()) is not None:
            self._signal_group(signal.SIGKILL)
            for pipe in self._pipes:
                pipe.finish()
            self.exited.set_result(code)

    def tell(self, stage: str, progress: float) -> None:
        """How far the start of the server has come, if the process listens."""
        if self._heart is not None and not self._heart.closed:
            with suppress(OSError):
                os.write(self._heart.fileno(), heartbeats.stage_line(stage, progress))

    def kill_hung(self, why: str) -> None:
        self._hung = why
        logger.error("%s is hung: %s", self.name, why)
        self.kill()

    @property
    def is_hung(self) -> bool:
        return self._hung is not None

    def terminate(self) -> None:
        """Send SIGTERM to the process, which stops its own children."""
        if self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the process group."""
        if self.is_running:
            self._signal_group(signal.SIGKILL)

    def describe_exit(self) -> str:
        """`shard-0 exited with code 1: the last line it wrote to stderr`"""
        code = self.exited.result()
        if self._hung is not None:
            how = f"was hung and killed: {self._hung}"
        elif code < 0:
            how = f"was killed by {signal_name(-code)}"
            how += ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
        last = next((line.strip() for line in reversed(self.stderr) if line.strip()), "")
        return f"{self.name} {how}" + (f": {last.removeprefix('error: ')}" if last else "")

    def show_stderr(self) -> None:
        """Print what it wrote to stderr, unless that is a single line: `describe_exit` quotes it."""
        if len(self.stderr) > 1:
            report(*self.stderr)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _take_stdout(self, line: str) -> None:
        if record := parse(line):
            # All shards use the same program name; ours includes the rank.
            record.program = self.name
            logging.getLogger().handle(record)
        elif line.strip():
            logger.info("%s", line, extra={"program": self.name})

    def _take_beat(self, line: str) -> None:
        self.beat_at, self.has_beaten = time.monotonic(), True
        if line == heartbeats.DONE:
            self.beat_at, self.has_loaded = None, True

    def _take_stderr(self, line: str) -> None:
        self.stderr.append(line)
        logger.debug("%s", line, extra={"program": self.name})


class Supervisor:
    """Starts and stops children and handles signals while the context is entered."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = asyncio.Event()
        # After signals: 0, or that of the second signal, which killed everything.
        self.exit_code = 0
        self._signalled_at = 0.0

    def __enter__(self) -> Supervisor:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in STOP_SIGNALS:
            # nohup makes its child ignore SIGHUP: keep it that way.
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

    def start(self, command: ProcessCommand) -> Child:
        child = Child(command)
        self.children = [*(other for other in self.children if other.is_running), child]
        return child

    async def first_exit(self, child: Child) -> Child | None:
        """The child, once it has exited, or None after a stop signal."""
        asked = asyncio.ensure_future(self.stopping.wait())
        events: list[asyncio.Future[Any]] = [asked, child.exited]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return None if self.stopping.is_set() else child

    async def stop(self, *children: Child, grace: float) -> None:
        """Terminate the children, and kill those that still run after `grace` seconds."""
        if not children:
            return
        for child in children:
            child.terminate()
        await asyncio.wait([child.exited for child in children], timeout=grace)
        for child in children:
            if child.is_running:
                logger.warning("%s did not stop within %g s: killing it", child.name, grace)
                child.kill()
        await asyncio.wait([child.exited for child in children], timeout=KILL_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first ends everything in order, the second at once. An impatient person may press Ctrl-C quickly."""
        now = time.monotonic()
        if not self.stopping.is_set():
            logger.info("Received %s: stopping", number.name)
            self._signalled_at = now
            self.stopping.set()
        elif number == signal.SIGINT or now - self._signalled_at > SAME_SIGNAL_SECONDS:
            self.exit_code = 128 + number
            logger.warning("Second signal, %s: killing all processes", number.name)
            for child in self.children:
                child.kill()

    def _reap(self) -> None:
        for child in self.children:
            child.reap()
        if os.getpid() == 1:
            reap_adopted({child.pid for child in self.children})


class _PipeReader:
    """Splits the output of a pipe into lines as it arrives."""

    def __init__(self, pipe: IO[bytes], take: Callable[[str], None]) -> None:
        self._pipe = pipe
        self._take = take
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    def finish(self) -> None:
        """Read what is in the pipe now, but not until EOF: a grandchild may hold it open."""
        while not self._pipe.closed and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        """Read one chunk; False if there is none."""
        try:
            chunk = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended, and had not read all that it was told
            chunk = b""
        if not chunk:
            self._close()
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
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


def reap_adopted(own: Set[int]) -> None:
    """The first process of a container becomes the parent of what its children leave behind, HTTP workers of a router
    that died for example, and would keep them as zombies. `own` are asked for their exit codes by others."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def die_with(parent: int) -> Callable[[], None] | None:
    """A preexec function that makes the kernel kill the child when the launcher dies."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec as little Python as possible should run.
    prctl = ctypes.CDLL(None).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
