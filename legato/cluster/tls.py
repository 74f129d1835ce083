"""Mutual TLS on connections between machines, before the authentication with the cluster key.

Whoever uses a connection gets one end of a pair of local sockets, which behaves as the connection would; a thread
carries bytes between its other end and the network. So links, tunnels and messages are the same with and without TLS,
and one thread alone uses OpenSSL's object, which two must not.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from legato.cluster.frames import BrokenLink
from legato.cluster.secret import ForeignProtocol
from legato.common.errors import OptionError

# Bytes to read at once, and that wait in one direction before no more are read.
CHUNK = 1 << 18
# What the listener says when it trusts the caller. In TLS 1.3 a caller is through before its certificate was looked at.
TRUSTED = b"\x01"
# OpenSSL's numbers of errors: not valid yet, expired.
OUT_OF_DATE = (9, 10)


class UntrustedPeer(ForeignProtocol):
    """One end has no certificate of the authority that the other one trusts, or speaks no TLS."""


@dataclass(frozen=True)
class LinkTls:
    """The certificate of this machine, and the authority that signed those of all machines. OptionError."""

    certfile: str
    keyfile: str
    cafile: str
    _contexts: dict[bool, ssl.SSLContext] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        contexts = {is_listener: self._context(is_listener=is_listener) for is_listener in (False, True)}
        object.__setattr__(self, "_contexts", contexts)

    @classmethod
    def of(cls, certfile: str | None, keyfile: str | None, cafile: str | None) -> LinkTls | None:
        """None if no file is given."""
        given = {"--cluster-certfile": certfile, "--cluster-keyfile": keyfile, "--cluster-cafile": cafile}
        missing = [flag for flag, file in given.items() if not file]
        if len(missing) == len(given):
            return None
        if missing:
            raise OptionError(
                f"TLS between machines needs --cluster-certfile, --cluster-keyfile and --cluster-cafile:"
                f" {' and '.join(missing)} is missing"
            )
        return cls(str(certfile), str(keyfile), str(cafile))

    def _context(self, *, is_listener: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_listener else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Machines are found by address, and any of them may be asked: what counts is who signed the certificate.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        own = f"--cluster-certfile {self.certfile}, --cluster-keyfile {self.keyfile}"
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except ssl.SSLError as error:
            problem = "not a certificate and its unencrypted private key in PEM format"
            raise OptionError(f"{own}: {problem} ({error.reason or 'PEM'})") from None
        except OSError as error:
            raise OptionError(f"{own}: {error.strerror}") from None
        try:
            context.load_verify_locations(self.cafile)
        except ssl.SSLError as error:
            problem = "not certificates in PEM format"
            raise OptionError(f"--cluster-cafile {self.cafile}: {problem} ({error.reason or 'PEM'})") from None
        except OSError as error:
            raise OptionError(f"--cluster-cafile {self.cafile}: {error.strerror}") from None
        return context

    async def wrap(self, connection: socket.socket, *, is_listener: bool) -> socket.socket:
        """The connection, encrypted; this one belongs to it. OSError, BrokenLink, UntrustedPeer."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = self._contexts[is_listener].wrap_bio(incoming, outgoing, server_side=is_listener)
        handshake = _Handshake(connection, session, incoming, outgoing)
        try:
            await handshake.run(session.do_handshake)
            if is_listener:
                session.write(TRUSTED)
                await handshake.flush()
            elif await handshake.run(lambda: session.read(len(TRUSTED))) != TRUSTED:
                raise BrokenLink("the other end closed the link")
        except ssl.SSLError as error:
            with suppress(OSError):
                await handshake.flush()  # the alert that says why
            raise UntrustedPeer(self._problem(error)) from None
        inner, outer = socket.socketpair()
        _Pump(connection, outer, session, incoming, outgoing).start()
        return EncryptedSocket(inner, connection.getsockname())

    def _problem(self, error: ssl.SSLError) -> str:
        reason = error.reason or "TLS"
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in OUT_OF_DATE:
                return f"its --cluster-certfile cannot be used now: {error.verify_message}; renew it, or set the clock"
            return f"its certificate is not signed by --cluster-cafile {self.cafile}: {error.verify_message}"
        if "ALERT" in reason or "ALERT" in str(error).upper():
            return f"it refused the certificate of --cluster-certfile {self.certfile} ({reason})"
        return f"it does not speak TLS 1.3 ({reason}): --cluster-certfile must be given on all machines or on none"


class EncryptedSocket(socket.socket):
    """Where the user of an encrypted connection reads and writes."""

    def __init__(self, inner: socket.socket, address: Any) -> None:
        super().__init__(inner.family, inner.type, inner.proto, inner.detach())
        self._address = address
        self.setblocking(False)

    def getsockname(self) -> Any:
        """Of the connection to the other machine."""
        return self._address


class _Handshake:
    def __init__(
        self, connection: socket.socket, session: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        self._connection, self._session = connection, session
        self._incoming, self._outgoing = incoming, outgoing
        self._loop = asyncio.get_running_loop()

    async def run(self, step: Any) -> Any:
        """What `step` returns, once there are enough bytes for it."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self.flush()
            else:
                await self.flush()
                return result
            data = await self._loop.sock_recv(self._connection, CHUNK)
            if not data:
                raise BrokenLink("the other end closed the link")
            self._incoming.write(data)

    async def flush(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self._connection, self._outgoing.read())


class _Pump(threading.Thread):
    """Carries bytes both ways until one end closes."""

    def __init__(
        self,
        network: socket.socket,
        local: socket.socket,
        session: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        super().__init__(name="cluster-tls", daemon=True)
        local.setblocking(False)
        self._network, self._local, self._session = network, local, session
        self._incoming, self._outgoing = incoming, outgoing
        # What could not be written yet.
        self._to_network, self._to_local = bytearray(), bytearray()

    def run(self) -> None:
        with suppress(OSError):  # SSLError is one
            self._decrypt()  # what came with the end of the handshake
            while self._turn():
                pass
        self._finish()
        for connection in (self._network, self._local):
            connection.close()

    def _turn(self) -> bool:
        """Waits for something to do. False at the end of either side."""
        poll = select.poll()
        for connection, received, to_send in (
            (self._network, self._to_local, self._to_network),
            (self._local, self._to_network, self._to_local),
        ):
            if events := self._events(received, to_send):  # else its end would be reported again and again
                poll.register(connection, events)
        ready = dict(poll.poll())
        is_open = True
        if ready.get(self._local.fileno(), 0) & ~select.POLLOUT and len(self._to_network) < CHUNK:
            is_open = self._from_local()
        if ready.get(self._network.fileno(), 0) & ~select.POLLOUT and len(self._to_local) < CHUNK:
            is_open = self._from_network() and is_open
        self._send(self._network, self._to_network)
        self._send(self._local, self._to_local)
        return is_open

    @staticmethod
    def _events(received: bytearray, to_send: bytearray) -> int:
        reads = select.POLLIN if len(received) < CHUNK else 0
        return reads | (select.POLLOUT if to_send else 0)

    def _from_local(self) -> bool:
        try:
            data = self._local.recv(CHUNK)
        except BlockingIOError:
            return True
        if data:
            self._session.write(data)
        else:
            with suppress(ssl.SSLError):
                self._session.unwrap()  # says that nothing follows
        self._to_network += self._outgoing.read()
        return bool(data)

    def _from_network(self) -> bool:
        try:
            data = self._network.recv(CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._incoming.write(data)
        return self._decrypt()

    def _decrypt(self) -> bool:
        is_open = True
        while is_open:
            try:
                data = self._session.read(CHUNK)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                data = b""
            self._to_local += data
            is_open = bool(data)
        self._to_network += self._outgoing.read()  # keys are renewed now and then
        return is_open

    @staticmethod
    def _send(connection: socket.socket, waiting: bytearray) -> None:
        with suppress(BlockingIOError):
            while waiting:
                del waiting[: connection.send(waiting)]

    def _finish(self) -> None:
        """One side has ended, or failed: what it said last goes out."""
        for connection, waiting in ((self._network, self._to_network), (self._local, self._to_local)):
            with suppress(OSError):
                connection.settimeout(1.0)
                connection.sendall(waiting)
