"""A client who does not take what is written for it, and nothing else that could tell."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message

from legato.http import exchange as exchanges
from legato.http.exchange import ABORT, ClientConnection, Exchange


class Connection:
    """A server's side of ASGI: writes wait until `taken`, and everything ends when it is broken off."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self._lost = asyncio.Event()
        self.exchange = Exchange({"headers": [], ABORT: self._abort}, self._receive, self._send)

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def _abort(self) -> None:
        self._lost.set()
        self.taken.set()

    async def _receive(self) -> Message:
        await self._lost.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.taken.wait()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "WRITE_PATIENCE", 0.03)


def test_a_write_that_waits_for_too_long_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        connection, hung_up = Connection(), asyncio.Event()
        with caplog.at_level(logging.WARNING), connection.exchange.client() as client:
            client.when_gone(hung_up.set)
            await asyncio.wait_for(connection.exchange.write(b"a token"), 5)
            assert connection.is_lost
            await asyncio.wait_for(hung_up.wait(), 5)
        assert "reads too slowly" in caplog.text

    asyncio.run(main())


def test_writes_that_go_through_and_silence_do_not() -> None:
    async def main() -> None:
        connection = Connection()
        connection.taken.set()
        with connection.exchange.client():
            for _ in range(10):
                await connection.exchange.write(b"a token")
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        assert not connection.is_lost

    asyncio.run(main())


def test_nobody_is_watched_when_all_is_said() -> None:
    async def main() -> None:
        connection = Connection()
        with connection.exchange.client() as client:
            assert isinstance(client, ClientConnection)
        late = asyncio.create_task(connection.exchange.write(b"the end"))
        await asyncio.sleep(0.1)
        assert not connection.is_lost
        late.cancel()

    asyncio.run(main())
