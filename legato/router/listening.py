"""The port: bound and listened on before anything slow, handed to the workers once the model is ready.

Every worker has a socket of its own on it, and the kernel spreads new connections over them (SO_REUSEPORT). We keep
them all: connections that wait for a worker that died are there for its successor.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from legato.common.errors import EndpointInUse

# Connections that wait to be accepted; uvicorn's own figure.
BACKLOG = 2048
# Elsewhere the option exists, too, but one socket gets all connections.
KERNEL_SPREADS = sys.platform == "linux"


class Listeners:
    """One socket per worker; all the same one where the kernel does not spread connections."""

    def __init__(self, host: str, port: int, num: int) -> None:
        """Bound but not listening."""
        self._address = (host, port)
        self._are_several = num > 1 and KERNEL_SPREADS
        with _naming_the_flags(*self._address):
            self._check()
            first = self._bind()
            # Port 0 asks for any free port; all sockets must share the one that is found.
            self._address = (host, first.getsockname()[1])
            others = [self._bind() if self._are_several else first for _ in range(num - 1)]
        self.sockets = [first, *others]

    def listen_first(self) -> socket.socket:
        """Listen on the first socket only, and return another handle of it: what is not accepted there when the handle
        is closed waits for a worker. Two programs may bind a port that neither listens on; the second one to listen
        learns of it here."""
        with _naming_the_flags(*self._address):
            self._check()
            self.sockets[0].listen(BACKLOG)
        return self.sockets[0].dup()

    def listen(self) -> None:
        """On all of them."""
        with _naming_the_flags(*self._address):
            for listener in self.sockets:
                listener.listen(BACKLOG)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()

    @property
    def host(self) -> str:
        return self._address[0]

    @property
    def port(self) -> int:
        return self._address[1]

    def _bind(self) -> socket.socket:
        listener = self._socket()
        if self._are_several:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(self._address)
        return listener

    def _check(self) -> None:
        """Sockets that share a port would share it with another router, too. One that does not share shows whether
        another program listens there."""
        if self._are_several:
            with self._socket() as probe:
                probe.bind(self._address)

    def _socket(self) -> socket.socket:
        return new_socket(self._address[0])


def new_socket(host: str) -> socket.socket:
    """To be bound to an address of this kind, even if connections of an earlier server are still being closed."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


@contextmanager
def _naming_the_flags(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EndpointInUse(f"cannot listen on {host}:{port} (--hostname, --port): {error.strerror}") from None
