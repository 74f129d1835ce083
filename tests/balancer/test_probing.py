"""Probes of replicas, over real sockets."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from legato.balancer import shared
from legato.balancer.probing import Probes
from legato.balancer.replicas import ReplicaSet, ReplicaUrl
from legato.ipc.multiplexing import STREAMS_PATH
from tests.balancer.test_choice import state

INTERVAL = 0.01


async def _until(condition: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await condition.wait()


def test_a_shared_connection_that_is_not_answered_does_not_delay_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is being replaced may accept a connection and say nothing."""
    monkeypatch.setattr(shared, "CONNECT_SECONDS", 1000.0)

    async def run() -> None:
        num_probes, is_opening, was_probed_since = 0, asyncio.Event(), asyncio.Event()
        body = msgspec.json.encode(state(resumes=True, http_workers=1))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_probes
            head = await reader.readuntil(b"\r\n\r\n")
            if STREAMS_PATH.encode() in head.split(b"\r\n")[0]:
                is_opening.set()
                return
            num_probes += 1
            if is_opening.is_set() and num_probes > 5:
                was_probed_since.set()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        replicas = ReplicaSet(None)
        replicas.update([ReplicaUrl("127.0.0.1", server.sockets[0].getsockname()[1])])
        [replica] = replicas.all
        probes = Probes(replicas, "a-key", INTERVAL, 5.0, lambda replica, was_emptied: None)
        probes.start(replica)
        await _until(is_opening)
        await _until(was_probed_since)
        assert replica.is_up
        probes.close()
        server.close()

    asyncio.run(run())
