"""Accepts connections: many in one turn of the event loop, and never more than there are file descriptors for.

When all places are taken, the connection that has been idle longest makes room. Healthy clients send their request at
once, so those who hold connections for nothing are closed first.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from legato.common.throttled_log import ThrottledLog

logger = logging.getLogger(__name__)

# Connections to accept in one turn of the event loop. uvloop accepts one: when thousands connect at once and each turn
# has a step's tokens to write, the last of them, a health check perhaps, would wait for seconds.
ACCEPTED_PER_TURN = 64
# Seconds without accepting when a connection cannot be had. The listener stays readable: without a pause the event
# loop would do nothing else.
BACK_OFF = 0.2
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts on one listener, from `start` to `stop`."""

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        has_room: Callable[[], bool],
        make_room: Callable[[], object],
    ) -> None:
        """`take` is given each connection. `has_room` says whether it could take one more; `make_room` gives a file
        descriptor back, if that is possible."""
        self._listener = listener
        self._take = take
        self._has_room = has_room
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._log = ThrottledLog(logger)
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            if not self._has_room():
                self._log.warning("All connections are in use: new clients wait until one is closed")
                self._back_off()
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room()
                    self._log.warning(
                        "Connections cannot be accepted: the process or the system has no more file descriptors or"
                        " memory for them (see `ulimit -n`)"
                    )
                    self._back_off()
                return  # or no client waits any more
            self._take(connection)

    def _back_off(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(BACK_OFF, self.start)
