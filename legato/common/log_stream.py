"""Where log lines go if somebody reads them as they are written: a pipe, a terminal or a socket.

Such a reader may be slow or stop (Ctrl-S, a pager, a log driver that hangs), and a write would then wait for it, and
with it the server. Here lines are kept until the reader takes them, up to `BACKLOG`; then they are dropped and counted.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

# Bytes of lines that the reader has not taken, and seconds until it is tried again.
BACKLOG = 1 << 20
RETRY_SECONDS = 0.05
# Seconds that a thread without an event loop may wait for the reader within so many seconds: it has no later time.
PATIENCE = 0.2
WINDOW = 10.0

# Writes some of the bytes, or raises BlockingIOError.
Write = Callable[[bytes], int]


class LogStream:
    """What `logging.StreamHandler`, which locks it, needs of a text stream."""

    def __init__(self, fd: int, write: Write) -> None:
        self.num_lost = 0
        self._fd = fd
        self._write = write
        self._reader = select.poll()
        self._reader.register(fd, select.POLLOUT)
        self._backlog = bytearray()
        # The event loop that tries again in a moment, whose thread may not be the one that logs.
        self._retries_on: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._patience = PATIENCE
        self._window_began = time.monotonic()

    def write(self, text: str) -> int:
        """To be followed by `flush`, which writes it."""
        with self._lock:
            if len(self._backlog) < BACKLOG:
                self._backlog += text.encode(errors="backslashreplace")
            else:
                self.num_lost += 1
        return len(text)

    def flush(self) -> None:
        """Write as much as the reader takes now; the rest later. OSError if there is no reader any more."""
        with self._lock:
            self._push()

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    @property
    def is_taken(self) -> bool:
        """Whether somebody read what was written."""
        return not self._backlog

    def _push(self) -> None:
        try:
            while self._backlog:
                try:
                    # Whole lines that a pipe takes as a whole: other processes write to it, too.
                    end = self._backlog.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
                    del self._backlog[: self._write(bytes(self._backlog[:end]))]
                except BlockingIOError:
                    if not self._wait():
                        return
        except OSError:
            self._backlog.clear()
            raise

    def _wait(self) -> bool:
        """For the reader, unless there is an event loop, which tries again. Whether it is worth another try now."""
        with suppress(RuntimeError):  # there is none
            loop = asyncio.get_running_loop()
            if self._retries_on is not loop:
                self._retries_on = loop
                loop.call_later(RETRY_SECONDS, self._flush_again)
            return False
        began = time.monotonic()
        if began - self._window_began > WINDOW:
            self._patience, self._window_began = PATIENCE, began
        found = self._reader.poll(self._patience * 1000) if self._patience > 0 else []
        self._patience -= time.monotonic() - began
        return bool(found)

    def _flush_again(self) -> None:
        self._retries_on = None
        with suppress(OSError):
            self.flush()


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
