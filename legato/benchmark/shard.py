"""The shard under test: one that runs already, or one of our own for as long as the benchmark takes."""

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

from legato.common.errors import LegatoError, OptionError
from legato.modelfiles.shapes import SHAPES, write_shape

T = TypeVar("T")

# Enough for the end of a traceback.
SHOWN_LINES = 12
STOP_SECONDS = 10.0
# Somebody else's shard is there or it is not; one of our own may have to download its model first.
CONNECT_SECONDS = 10.0


class ShardFailed(LegatoError):
    """The shard under test ended, or refuses to be measured."""


class Shard:
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
        """Raise with the last words of a shard of ours that has ended, or does within `patience` seconds."""
        if self._process is None:
            return
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return
        assert self._log is not None
        lines = self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        how = f"code {self._process.returncode}" if self._process.returncode >= 0 else _signal_name(self._process)
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


def running(socket: str) -> Shard:
    """A shard that somebody started."""
    if not os.path.exists(socket):
        raise OptionError(
            f"no shard listens on {socket}: start one with `text-generation-server serve`, or let the benchmark do it"
        )
    return Shard(socket)


@contextmanager
def spawned(model: str | None, arguments: Sequence[str]) -> Iterator[Shard]:
    """A shard of our own: `model` is what the server takes, the name of a shape, or None for the default model."""
    with tempfile.TemporaryDirectory(prefix="legato-bench-") as folder:
        log = Path(folder) / "shard.log"
        with log.open("wb") as output, _terminable():
            process = subprocess.Popen(
                _command(model, arguments, Path(folder)), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            shard = Shard(f"{folder}/shard-0", process, log)
            try:
                yield shard
            except LegatoError:
                # Sockets close before a process is gone, and its own words say more than a broken stream.
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
    return [*words, f"--uds-path={folder}/shard", *arguments]


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that it does not leave the shard behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # a shell lets the jobs in its background ignore Ctrl-C
            raise KeyboardInterrupt
        handler(number, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal_name(process: subprocess.Popen[bytes]) -> str:
    return signal.Signals(-process.returncode).name
