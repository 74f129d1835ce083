"""One HTTP connection: uvicorn's protocol with limits on requests, and a lingering close.

The parser keeps half a header until it has the rest, so the bytes that are fed to it are counted from outside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast
from weakref import ref

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from legato.api.errors import RequestError
from legato.common.throttled_log import ThrottledLog
from legato.http.connections.cycles import CloseDelimitedCycle, OrderedReading, write_chunk
from legato.http.connections.limits import (
    ConnectionLimits,
    HeadersTooLarge,
    RequestTooSlow,
    SeveralHosts,
    UriTooLong,
)
from legato.http.connections.lingering_close import LingeringConnections, LingeringTransport
from legato.http.connections.multiplexed import MultiplexedRequests
from legato.http.connections.shortage import BodyMemory, IdleConnections
from legato.http.connections.upgrades import head_of_body, parser_behind_head
from legato.http.exchange import ABORT, HOLD, SWITCH, WATCH, WRITE
from legato.ipc.multiplexing import UPGRADE

logger = logging.getLogger(__name__)

# Bytes to read from a connection at once, and of a body to keep for an application that is busy.
READ_SIZE = 16 * 1024
# Bytes to discard of a body that is not read, besides as many as the application takes: what was under way when the
# answer was written.
SLACK = 2 * READ_SIZE
# Bytes of a head to parse at once: few requests fit in it.
HEAD_PIECE = 1024
# Bodies of the largest size that a worker receives at once, however large that is.
FEWEST_BODIES = 8
# Of a header line, besides name and value.
LINE_OVERHEAD = len(b": \r\n")


class ConnectionContext:
    """What all connections of a server share."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits, payload_limit: int) -> None:
        self.config = config
        self.state = state
        self.limits = limits
        self.payload_limit = payload_limit
        self.lingering = LingeringConnections(limits.max_lingering)
        # From the moment they are accepted until they are closed or linger.
        self.open: set[HttpProtocol] = set()
        self.idle = IdleConnections()
        self.bodies = BodyMemory(max(limits.incomplete_bytes, FEWEST_BODIES * payload_limit))
        self.log = ThrottledLog(logger)


class HttpProtocol(HttpToolsProtocol):
    """A connection that the application can abort, for clients that do not read, and that lingers after its last
    answer, for clients that are still sending."""

    flow: OrderedReading

    def __init__(self, context: ConnectionContext) -> None:
        super().__init__(context.config, context.state, {})
        self._context = context
        self._limits = context.limits
        # Bytes of the body of the current request that were read, and whether more of it is to come.
        self._num_read = 0
        self._in_body = False
        # Whether a request has begun whose headers are not complete.
        self._in_head = False
        self._has_host = False
        # Bytes of the request line, headers and trailers of the current request that the parser has reported, and
        # bytes that it was given since it last reported a complete head or a piece of a body.
        self._head_size = 0
        self._num_fed = 0
        # When the client must have sent the rest of what it began; None while it is not its turn.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._body_began = 0.0
        self._refusal: RequestError | None = None
        # Set when a balancer has taken the connection for many requests.
        self._multiplexed: MultiplexedRequests | None = None
        # The request that is being answered; `cycle` is the newest, of which others may be in front.
        self._served: RequestResponseCycle | None = None
        # Called when the client hangs up, by the requests that want to know. One that has answered may not be over yet
        # when the next begins.
        self._watchers: set[Callable[[], None]] = set()
        self._is_lost = False
        # What establishes the connection, during its TLS handshake.
        self.arriving: asyncio.Task[object] | None = None

    # ---- the connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.arriving = None
        super().connection_made(LingeringTransport(transport, self._allowance, self._context.lingering))
        self.flow = OrderedReading(self.transport)
        self._context.idle.add(self)
        self._expect_within(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.open.discard(self)
        self._context.idle.discard(self)
        self._context.bodies.end(self)
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._is_lost = True
        if self._served is not None and not self._served.response_complete:  # uvicorn tells only the newest
            self._served.disconnected = True
            self._served.message_event.set()
        watchers, self._watchers = self._watchers, set()
        for on_gone in watchers:
            on_gone()
        # All of these know this protocol, too. Only the garbage collector would find them, and a flood of connections
        # would have it look for so long that all streams notice.
        self.cycle = self.scope = self._served = None  # type: ignore[assignment]
        self.pipeline.clear()
        cast(LingeringTransport, self.transport).forget_protocol()

    def close_at_once(self) -> None:
        self._context.open.discard(self)  # its descriptor is free by the next turn of the event loop
        if self.arriving is not None:
            self.arriving.cancel()
        else:
            cast(LingeringTransport, self.transport).close_at_once()

    def _allowance(self) -> int:
        if self.scheme == "https" and not (self._in_body or self._in_head):
            return 0  # the client is not sending
        return self._context.payload_limit + SLACK - self._num_read

    @property
    def _is_answered(self) -> bool:
        """Whether nothing that was asked so far waits for its answer."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Heads are parsed in small pieces: a client that sends hundreds of requests in advance waits for its answers,
        and so does what it has sent."""
        while data:
            size = len(data) if self._in_body else HEAD_PIECE
            self._feed(data[:size])
            data = data[size:]
            if self.transport.is_closing():
                return
            if self.pipeline and data:
                self.flow.unparsed = data
                self.flow.pause_reading()
                return

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if (b"upgrade", UPGRADE) not in self.headers:
                self._ignore_upgrade(data[upgrade.args[0] :])
                return
        except httptools.HttpParserError:
            if self._refusal is None:
                self._context.log.warning("A client sent something that is not HTTP/1.1")
                self.send_400_response("Invalid HTTP request received.")
                return
        if self._refusal is None and self._num_fed > self._limits.header_bytes:
            if not (self._is_answered or self._in_body):
                self.flow.pause_reading()  # until the answer is written; then this is looked at again
                return
            self._refusal = HeadersTooLarge(self._limits) if self.headers else UriTooLong(self._limits.header_bytes)
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._deadline is None and self._is_answered:
            # Nothing of a request yet, perhaps an empty line: the keep-alive timer is off all the same.
            self._expect_within(self._limits.header_seconds)

    def _ignore_upgrade(self, data: bytes) -> None:
        """Served as if the client had not asked: an upgrade is optional for the server. `data` follows the head."""
        self._context.log.warning("A client requested another protocol (Upgrade), which is ignored")
        if head := head_of_body(self.headers):
            self.parser = parser_behind_head(self)
        if head + data and not self.transport.is_closing():
            self._feed(head + data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]  # scopes may have more keys
        self.scope[WATCH] = self._watch  # type: ignore[literal-required]
        self.scope[HOLD] = self.transport.hold_next_write  # type: ignore[literal-required, attr-defined]
        self._num_read = self._head_size = 0
        self._in_head, self._has_host = True, False
        self._expect_within(self._limits.header_seconds)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_size += len(url)
        if self._head_size > self._limits.header_bytes:
            self._stop_parsing(UriTooLong(self._limits.header_bytes))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers come here too, and count."""
        super().on_header(name, value)
        if len(name) == 4 and name.lower() == b"host":
            # RFC 9112, 3.2: a proxy in front of us may have looked at the other one.
            if self._has_host:
                self._stop_parsing(SeveralHosts())
            self._has_host = True
        self._head_size += len(name) + len(value) + LINE_OVERHEAD
        if self._head_size > self._limits.header_bytes or len(self.headers) > self._limits.num_headers:
            self._stop_parsing(HeadersTooLarge(self._limits))

    def on_headers_complete(self) -> None:
        self._num_fed = 0
        self._in_head, self._in_body = False, True
        self._context.idle.discard(self)
        self._context.bodies.begin(self)
        self._body_began = self._expect_within(self._limits.body_seconds)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = CloseDelimitedCycle
        else:
            self.scope[WRITE] = partial(write_chunk, ref(self.cycle))  # type: ignore[literal-required]
            self.scope[SWITCH] = self._switch  # type: ignore[literal-required]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Called by the application with what to call when the client hangs up. Returns what ends that."""
        if self._is_lost:
            on_gone()
        else:
            self._watchers.add(on_gone)
            if not self.transport.is_closing():
                self.flow.resume_reading()  # a connection that is not read from does not tell of its end
        return partial(self._watchers.discard, on_gone)

    def _switch(self) -> None:
        """Called by the application in place of an answer."""
        if self._is_lost:
            return
        self.cycle.response_started = self.cycle.response_complete = True
        self._multiplexed = MultiplexedRequests(
            cast(ASGIApp, self.app), cast(Scope, self.scope), self.transport, self.tasks, self.connection_lost
        )
        self._multiplexed.begin()

    def shutdown(self) -> None:
        if self._multiplexed is None:
            super().shutdown()
        else:
            self._multiplexed.finish()

    def on_body(self, body: bytes) -> None:
        """Reads on when the application has taken what is here. Once it has answered it takes nothing more."""
        super().on_body(body)
        self._num_fed = 0
        self._num_read += len(body)
        self._deadline = self._body_began + self._limits.body_seconds + self._num_read / self._limits.body_rate
        if self in self._context.bodies:
            self._context.bodies.add(self, len(body))
        if len(self.cycle.body) > READ_SIZE and not self.cycle.response_complete:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and head_of_body(self.headers):
            return  # that was the head
        self._num_fed = 0
        self._in_body = False
        self._deadline = None
        self._context.bodies.end(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._context.bodies.end(self)
        super().on_response_complete()
        if self.pipeline or self.flow.unparsed:
            self.flow.pause_reading()  # or every answer would let another buffer full of requests in
        if not (self.pipeline or self.transport.is_closing()):
            if self.flow.unparsed:
                self.loop.call_soon(self._go_on)
            else:
                self._context.idle.add(self)

    def _go_on(self) -> None:
        """Parse what was left when requests began to wait for their answers."""
        if self.pipeline or not self.flow.unparsed or self.transport.is_closing():
            return
        data, self.flow.unparsed = self.flow.unparsed, b""
        self.flow.resume_reading()
        self.data_received(data)

    # ---- refusals --------------------------------------------------------------------------------------------------

    def refuse_body(self) -> None:
        self._context.log.warning("Request bodies arrive too slowly and take too much memory: the oldest are refused")
        self._refuse(RequestTooSlow("The body of the request came too slowly for a busy server"))

    def _stop_parsing(self, refusal: RequestError) -> None:
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: RequestError) -> None:
        """Answer and close. Where another answer is under way there is no place for this one."""
        if self._in_body and self._is_answered:
            self.transport.close()
            return
        self._context.log.warning(f"A request is refused with status {error.status}: {error}")
        if not self._is_answered and (not self._in_body or self.pipeline or self.cycle.response_started):
            self.transport.abort()
        else:
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head % len(error.body) + error.body)
            self.transport.close()

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _expect_within(self, seconds: float) -> float:
        """Returns the time. There is one timer, which looks again when it finds a later deadline: most requests come
        with all they have, and need no timer of their own."""
        now = self.loop.time()
        self._deadline = now + seconds
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        return now

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None or self.transport.is_closing():
            return
        if self._deadline > self.loop.time():
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif self._in_body and self.flow.read_paused:  # it is the application that is slow
            self._body_began = self._expect_within(self._limits.body_seconds)
        elif not self._in_body and not self._is_answered:  # the beginning of another request, beside an answer
            self._expect_within(self._limits.header_seconds)
        elif self._in_body or self._in_head:
            part = "body" if self._in_body else "headers"
            self._refuse(RequestTooSlow(f"The {part} of the request did not arrive in time"))
        else:
            self.transport.close()


class SmallReads(asyncio.BufferedProtocol):
    """Feeds a protocol in small pieces. The event loop would read 256 KB at once, even of a body that the application
    refuses after the first kilobyte."""

    # Filled and emptied without a pause in between, so that all connections can share it.
    _buffer = bytearray(READ_SIZE)

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))
