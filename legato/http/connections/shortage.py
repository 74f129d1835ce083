"""Who has to go when a worker runs short: of connections the one that is idle longest, of memory for request bodies
the connection that has been sending its body longest. Healthy clients are through in a moment."""

from __future__ import annotations

from typing import Protocol


class Closable(Protocol):
    def close_at_once(self) -> None: ...

    def refuse_body(self) -> None: ...


class IdleConnections:
    """Connections without a request to answer, in the order in which they became idle; those in a TLS handshake too."""

    def __init__(self) -> None:
        self._connections: dict[Closable, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Closable) -> None:
        self._connections.pop(connection, None)
        self._connections[connection] = None

    def discard(self, connection: Closable) -> None:
        self._connections.pop(connection, None)

    def close_oldest(self) -> bool:
        """Whether there was one. It is closed by the next turn of the event loop."""
        connection = next(iter(self._connections), None)
        if connection is None:
            return False
        del self._connections[connection]
        connection.close_at_once()
        return True


class BodyMemory:
    """Bytes of bodies that are not complete yet, by connection, the one that began first in front."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Closable, int] = {}
        self.total = 0

    def begin(self, connection: Closable) -> None:
        self._held[connection] = 0

    def add(self, connection: Closable, num_bytes: int) -> None:
        self._held[connection] += num_bytes
        self.total += num_bytes
        while self.total > self._limit:
            oldest = next(iter(self._held))
            self.end(oldest)
            oldest.refuse_body()

    def end(self, connection: Closable) -> None:
        """The body is complete, or nobody wants it any more."""
        self.total -= self._held.pop(connection, 0)

    def __contains__(self, connection: Closable) -> bool:
        return connection in self._held
