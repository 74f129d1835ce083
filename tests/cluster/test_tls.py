"""TLS between machines: both ends need a certificate of the authority, besides the key."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from legato.cluster import connecting
from legato.cluster.connecting import GuardedListener, LinkTarget, call, connect
from legato.cluster.frames import FrameKind, send_message
from legato.cluster.links import TensorLink
from legato.cluster.relay import _tunnel
from legato.cluster.secret import WrongKey
from legato.cluster.tls import LinkTls, UntrustedPeer, _Pump
from legato.common.errors import OptionError
from tests.cluster.test_strangers import served

KEY = b"0123456789abcdef"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def run(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.file, self._key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run("req", "-x509", *new, "-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.file)

    def sign(self, name: str, days: int = 2) -> tuple[str, str]:
        """Certificate and key of a machine."""
        base = str(self._folder / f"{self._name}-{name}")
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run("req", *new, "-subj", f"/CN={name}", "-keyout", f"{base}.key", "-out", f"{base}.csr")
        signing = ["-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", str(days)]
        run("x509", "-req", "-in", f"{base}.csr", *signing, "-out", f"{base}.pem")
        return f"{base}.pem", f"{base}.key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "cluster")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def machines(authority: Authority) -> list[LinkTls]:
    return [LinkTls(*authority.sign(name), authority.file) for name in ("machine0", "machine1")]


class Listening:
    def __init__(self, tls: LinkTls | None) -> None:
        self.connections: list[socket.socket] = []
        self.listener = GuardedListener("127.0.0.1", 0, KEY, self._take, tls)

    def target(self, tls: LinkTls | None, key: bytes = KEY) -> LinkTarget:
        return LinkTarget("127.0.0.1", self.listener.port, key, tls=tls)

    async def _take(self, connection: socket.socket, kind: FrameKind, fields: dict[str, Any]) -> None:
        self.connections.append(connection)
        await send_message(connection, FrameKind.WELCOME)


def listening(tls: LinkTls | None, test: Callable[[Listening], Awaitable[None]]) -> None:
    async def main() -> None:
        there = Listening(tls)
        try:
            await served(there.listener, test(there))
        finally:
            for connection in there.connections:
                connection.close()

    asyncio.run(main())


def test_bytes_arrive_in_both_directions_and_the_network_sees_none_of_them(machines: list[LinkTls]) -> None:
    sizes = (1, 100, 70_000, 3_000_000)

    async def test(there: Listening) -> None:
        seen = bytearray()
        port = await copied(there.listener.port, seen)
        ours = await call(LinkTarget("127.0.0.1", port, KEY, tls=machines[1]), {"words": "a plain greeting"})
        assert ours.getsockname()[0] == "127.0.0.1"
        links = [TensorLink(ours, 0), TensorLink(there.connections[0], 1)]
        for size in sizes:
            data = b"tensor!!" * (size // 8 + 1)
            await asyncio.to_thread(exchange, links, data)
        for link in links:
            await asyncio.to_thread(link.close)
        assert len(seen) > 2 * sum(sizes)
        assert b"tensor!!" not in seen and b"greeting" not in seen and b"LGTO" not in seen

    listening(machines[0], test)


def exchange(links: list[TensorLink], data: bytes) -> None:
    """Both send before either reads, as stages do."""
    for link in links:
        link.send(data)
    for link in links:
        assert link.receive(len(data), timeout=20.0) == data


async def copied(port: int, seen: bytearray) -> int:
    """Another port, which leads to this one and keeps all that passes."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    number: int = server.sockets[0].getsockname()[1]
    return number


def test_the_end_of_one_side_is_the_end_of_the_other(machines: list[LinkTls]) -> None:
    async def test(there: Listening) -> None:
        ours = await call(there.target(machines[1]), {})
        lost: list[str] = []
        link = TensorLink(there.connections[0], 1, lost.append)
        ours.close()
        while not lost:
            await asyncio.sleep(0.01)
        assert "closed the link" in lost[0]
        link.close()

    listening(machines[0], test)


def test_the_key_is_needed_all_the_same(machines: list[LinkTls]) -> None:
    async def test(there: Listening) -> None:
        with pytest.raises(WrongKey):
            await connect(there.target(machines[1], b"another key of 16"))
        assert there.connections == []

    listening(machines[0], test)


def test_a_certificate_of_another_authority_is_refused_by_the_listener(
    machines: list[LinkTls], authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = stranger.sign("stranger")

    async def test(there: Listening) -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(UntrustedPeer, match=f"--cluster-certfile {cert}"):
            await connect(there.target(LinkTls(cert, key, authority.file)))
        assert there.connections == []

    listening(machines[0], test)
    assert f"not signed by --cluster-cafile {authority.file}" in caplog.text


def test_a_listener_of_another_authority_is_refused_by_the_caller(machines: list[LinkTls], stranger: Authority) -> None:
    async def test(there: Listening) -> None:
        with pytest.raises(UntrustedPeer, match=f"not signed by --cluster-cafile {stranger.file}"):
            await connect(there.target(LinkTls(machines[1].certfile, machines[1].keyfile, stranger.file)))

    listening(machines[0], test)


def test_a_certificate_that_has_expired_is_named(
    machines: list[LinkTls], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.sign("expired", days=-1)

    async def test(there: Listening) -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(UntrustedPeer, match=f"--cluster-certfile {cert}"):
            await connect(there.target(LinkTls(cert, key, authority.file)))

    listening(machines[0], test)
    assert "its --cluster-certfile cannot be used now: certificate has expired" in caplog.text


def test_a_thread_sleeps_while_the_network_takes_nothing(
    machines: list[LinkTls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the user has closed its end meanwhile, which poll reports until somebody looks."""
    turns: list[_Pump] = []
    turn = _Pump._turn

    def counted(pump: _Pump) -> bool:
        turns.append(pump)
        return turn(pump)

    monkeypatch.setattr(_Pump, "_turn", counted)

    async def main() -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        ours, theirs = await asyncio.gather(
            machines[0].wrap(ends[0], is_listener=True), machines[1].wrap(ends[1], is_listener=False)
        )
        sent = 0
        with suppress(BlockingIOError):
            for _ in range(400):
                sent += ours.send(bytes(1 << 16))
                await asyncio.sleep(0.002)
        ours.close()
        await asyncio.sleep(0.1)
        turns.clear()
        await asyncio.sleep(0.3)
        assert len(turns) < 20
        received = 0
        while data := await asyncio.get_running_loop().sock_recv(theirs, 1 << 20):
            received += len(data)
        assert received == sent, "what was sent before the end arrives"
        theirs.close()

    asyncio.run(main())


def test_what_was_said_last_goes_out_although_the_other_side_failed() -> None:
    class Broken:
        """Of which nothing can be decrypted."""

        def read(self, size: int) -> bytes:
            if incoming.pending:
                raise ssl.SSLError("bad record")
            raise ssl.SSLWantReadError

    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    (network, far), (local, near) = socket.socketpair(), socket.socketpair()
    network.setblocking(False)
    pump = _Pump(network, local, cast(ssl.SSLObject, Broken()), incoming, outgoing)
    pump._to_network += b"last words"
    far.send(b"garbage")
    pump.run()
    assert far.recv(100) == b"last words" and far.recv(100) == near.recv(100) == b""
    far.close()
    near.close()


def test_a_call_through_the_relay_ends_if_the_shard_is_not_trusted(
    machines: list[LinkTls], stranger: Authority
) -> None:
    """Its certificate may have expired since the relay started. The router must not wait for ever."""

    async def test(there: Listening) -> None:
        ours, relays = socket.socketpair()
        ours.setblocking(False)
        relays.setblocking(False)
        distrusting = LinkTls(machines[1].certfile, machines[1].keyfile, stranger.file)
        await asyncio.gather(_tunnel(relays, there.target(distrusting), {}), return_exceptions=True)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1), 5) == b""
        ours.close()

    listening(machines[0], test)


def test_a_machine_without_tls_is_named(machines: list[LinkTls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "PROOF_SECONDS", 0.3)

    async def plain_listener(there: Listening) -> None:
        with pytest.raises(UntrustedPeer, match="on all machines or on none"):
            await connect(there.target(machines[1]))

    async def plain_caller(there: Listening) -> None:
        with pytest.raises(TimeoutError, match="perhaps it expects TLS"):
            await connect(there.target(None))
        assert there.connections == []

    listening(None, plain_listener)
    listening(machines[0], plain_caller)


def test_missing_and_wrong_files_are_named(machines: list[LinkTls], tmp_path: Path) -> None:
    good = machines[0]
    assert LinkTls.of(None, None, None) is None
    with pytest.raises(OptionError, match="--cluster-keyfile and --cluster-cafile is missing"):
        LinkTls.of(good.certfile, None, None)
    with pytest.raises(OptionError, match=r"--cluster-certfile /nowhere.*No such file"):
        LinkTls.of("/nowhere", good.keyfile, good.cafile)
    with pytest.raises(OptionError, match=r"--cluster-keyfile .*: not a certificate and its"):
        LinkTls.of(good.certfile, machines[1].keyfile, good.cafile)
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(OptionError, match=f"--cluster-cafile {text}: not certificates"):
        LinkTls.of(good.certfile, good.keyfile, str(text))
