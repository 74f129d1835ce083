"""Where log lines go if somebody reads them as they are written: a pipe, a terminal or a socket.

Such a reader may stop (Ctrl-S, a pager, a log driver that hangs), and a write would then wait for ever, and with it the
server. Here a line waits for a moment; after that, lines are dropped and counted until the reader goes on.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from typing import TextIO

# Seconds that lines may wait for their reader, within so many seconds.
PATIENCE = 0.2
WINDOW = 10.0

# Writes some of the bytes, or raises BlockingIOError.
Write = Callable[[bytes], int]


class LogStream:
    """What `logging.StreamHandler` needs of a text stream."""

    def __init__(self, fd: int, write: Write) -> None:
        self.num_lost = 0
        self._fd = fd
        self._write = write
        self._reader = select.poll()
        self._reader.register(fd, select.POLLOUT)
        # The end of the line that was written last; it is completed before another one begins.
        self._rest = b""
        self._patience = PATIENCE
        self._window_began = time.monotonic()

    def write(self, text: str) -> int:
        """OSError if the reader is gone."""
        if self._rest:
            self._push()
        if self._rest:
            self.num_lost += 1
        else:
            self._rest = text.encode(errors="backslashreplace")
            self._push()
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered but the rest of a line that nobody takes."""

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    @property
    def is_taken(self) -> bool:
        """Whether somebody read what was written."""
        return not self._rest

    def _push(self) -> None:
        try:
            while self._rest:
                try:
                    self._rest = self._rest[self._write(self._rest) :]
                except BlockingIOError:
                    if not self._wait():
                        return
        except OSError:
            self._rest = b""
            raise

    def _wait(self) -> bool:
        """For the reader; whether it is worth another try."""
        began = time.monotonic()
        if began - self._window_began > WINDOW:
            self._patience, self._window_began = PATIENCE, began
        found = self._reader.poll(self._patience * 1000) if self._patience > 0 else []
        self._patience -= time.monotonic() - began
        return bool(found)


def log_stream(stream: TextIO) -> LogStream | TextIO:
    """The stream itself if writing to it never waits for anybody, as with a file."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
            return stream
        stream.flush()
        return LogStream(fd, _socket_writer(fd) if stat.S_ISSOCK(mode) else _writer(fd))
    except (OSError, ValueError):  # no file behind it, or a closed one
        return stream


def _socket_writer(fd: int) -> Write:
    connection = socket.socket(fileno=os.dup(fd))
    return lambda data: connection.send(data, socket.MSG_DONTWAIT)


def _writer(fd: int) -> Write:
    """O_NONBLOCK belongs to the open file, which other programs share with us: we open it once more."""
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # another system, or a pipe of another user
        return lambda data: _write_if_ready(fd, data)
    return lambda data: os.write(own, data)


def _write_if_ready(fd: int, data: bytes) -> int:
    """A pipe that is ready takes as much as this, unless somebody else writes at the same moment."""
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    if not ready.poll(0):
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])
