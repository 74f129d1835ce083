"""The shard under test: one that is running, or one that is started for the benchmark and stopped after it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from legato.common.errors import LegatoError, OptionError
from legato.modelfiles.shapes import SHAPES, write_shape

T = TypeVar("T")

# Enough for the end of a traceback.
SHOWN_LINES = 12
STOP_SECONDS = 10.0
# A shard that was running before is there or it is not; one that we start may have to download its model first.
CONNECT_SECONDS = 10.0
# Others are measured without speculation, too, and a step more or less is a step.
WITHOUT_DRAFTS = "--speculate=0"


class ShardFailed(LegatoError):
    """The shard under test ended, or refuses to be measured."""


class ShardProcess:
    """Where the shard listens, and its process if it is ours."""

    def __init__(self, socket: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
        self.socket = socket
        self._process = process
        self._log = log

    @property
    def connect_timeout(self) -> float | None:
        return CONNECT_SECONDS if self._process is None else None

    async def connected(self, connecting: Coroutine[Any, Any, T]) -> T:
        """The result of `connecting`, unless our shard dies first."""
        task = asyncio.ensure_future(connecting)
        try:
            while not task.done():
                self.check_alive()
                await asyncio.wait([task], timeout=0.1)
            return task.result()
        finally:
            task.cancel()

    def check_alive(self, patience: float = 0.0) -> None:
        """Raise with the last log lines if our shard has ended, or ends within `patience` seconds."""
        if self._process is None:
            return
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return
        assert self._log is not None
        lines = self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        code = self._process.returncode
        how = f"code {code}" if code >= 0 else signal.Signals(-code).name
        raise ShardFailed("\n  ".join([f"the shard ended with {how}" + ("; its last lines:" if lines else ""), *lines]))

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def without_drafts(arguments: Sequence[str]) -> list[str]:
    """These arguments of a shard or a launcher, and that it makes no drafts, unless they say what it does."""
    is_said = any(word.startswith("--speculate") for word in arguments)
    return [*arguments] if is_said else [WITHOUT_DRAFTS, *arguments]


def takes_shard_arguments(command: click.Command) -> click.Command:
    """Let the command take `-- ARGUMENTS...` for the shard that it starts."""
    command.params.append(click.Argument(["shard_args"], nargs=-1, type=click.UNPROCESSED))
    return command


@contextmanager
def shard_under_test(socket: str | None, model: str | None, cure: str) -> Iterator[ShardProcess]:
    """The shard that runs on `socket`, or else a new one for `model`, with the arguments after `--` of the running
    command. `cure` says how to have one started."""
    words: tuple[str, ...] = click.get_current_context().params["shard_args"]
    if socket is None:
        with spawned(model, words) as shard:
            yield shard
    elif words:
        raise OptionError(f"{words[0]!r} is an argument of a shard that the benchmark starts: {cure}")
    else:
        yield running(socket)


def running(socket: str) -> ShardProcess:
    """A shard that was started before."""
    if not os.path.exists(socket):
        raise OptionError(
            f"no shard listens on {socket}: start one with `text-generation-server serve`, or let the benchmark do it"
        )
    return ShardProcess(socket)


@contextmanager
def spawned(model: str | None, arguments: Sequence[str]) -> Iterator[ShardProcess]:
    """A new shard, without drafts unless the arguments have `--speculate`. `model` is what the server takes, the name
    of a shape, or None for the default model."""
    with tempfile.TemporaryDirectory(prefix="legato-bench-") as folder:
        log = Path(folder) / "shard.log"
        with log.open("wb") as output, terminable():
            process = subprocess.Popen(
                _command(model, arguments, Path(folder)), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            shard = ShardProcess(f"{folder}/shard-0", process, log)
            try:
                yield shard
            except LegatoError:
                # Sockets close before a process ends, and its own log says more than a broken stream.
                shard.check_alive(patience=0.5)
                raise
            finally:
                shard.stop()


def _command(model: str | None, arguments: Sequence[str], folder: Path) -> list[str]:
    script = Path(sys.executable).parent / "text-generation-server"
    words = [str(script)] if script.is_file() else [sys.executable, "-m", "legato.server.cli"]
    words.append("serve")
    if model in SHAPES:
        words += [str(write_shape(model, folder / model)), "--load-format=dummy"]
    elif model is not None:
        words.append(model)
    return [*words, f"--uds-path={folder}/shard", *without_drafts(arguments)]


@contextmanager
def terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that what was started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # shells start background jobs with SIGINT ignored
            raise KeyboardInterrupt
        handler(number, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
