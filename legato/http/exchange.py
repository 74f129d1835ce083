"""One HTTP exchange through ASGI itself: what the token path uses instead of a framework's request and response."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from legato.api.errors import ClientGone, CompressedBody, InvalidRequest, MalformedBody, PayloadTooLarge
from legato.common.exposure import is_loopback

if TYPE_CHECKING:
    from legato.http.routed import RoutedRequest
    from legato.http.telemetry.tracing import RequestTrace

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Where an ASGI scope holds the server's own `send`.
DIRECT_SEND = "legato.send"
# ... and, if the server has one, a function that breaks the connection off with all that is still to be sent.
ABORT = "legato.abort"
# ... and one that writes a chunk of a body at once, and says whether it could.
WRITE = "legato.write"
# ... and one that has the head of an answer sent together with the first bytes of its body.
HOLD = "legato.hold"
# ... and one that is given what to call when the client hangs up, at once if it has; it returns what ends that.
WATCH = "legato.watch"
# ... and one that says whether tokens should wait for those before, and is given what to call when they need not.
PACE = "legato.pace"
# ... and one that makes the connection one for many requests (`connections/multiplexed.py`).
SWITCH = "legato.switch"
# ... and whose request it is, among those who share the server.
TENANT = "legato.tenant"
# ... and the name of the handler, for the log and for traces.
ROUTE = "legato.route"
# ... and the trace that the request belongs to, if it is traced.
TRACE = "legato.trace"
# ... and what the balancer in front of us says of it, if it came through one that has our key.
ROUTED = "legato.routed"
# Headers of requests that a web page or a proxy sends for somebody else.
INDIRECT = frozenset({b"origin", b"forwarded", b"x-forwarded-for"})
# Seconds for a client to take what is sent to it. A write waits only when a few hundred kilobytes are on the way.
WRITE_PATIENCE = 60.0
# Characters of what a client sent that an error repeats.
_SHOWN = 64
# What msgspec says where JSON ends, and what often stands there: a number of other languages, after its name.
_PLACE = re.compile(r"invalid character \(byte (\d+)\)")
_NAME = re.compile(rb'"([^"\\]{1,64})"\s{0,9}:\s{0,9}-?$')
_NO_NUMBER = re.compile(rb"NaN|Infinity")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as a struct: 400 if it is not JSON, 422 if it is JSON of another shape."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _is_json(body):
            raise InvalidRequest("strings must not contain unpaired surrogates") from None
        raise MalformedBody(_cause(str(error), body)) from None


def _cause(problem: str, body: bytes) -> str:
    """Languages write down numbers that JSON does not have, and their users wonder which field it was."""
    place = _PLACE.search(problem)
    start = int(place[1]) if place else len(body)
    word, name = _NO_NUMBER.match(body, start), _NAME.search(body, max(0, start - 2 * _SHOWN), start)
    if word is None or name is None:
        return problem
    return f"`{name[1].decode(errors='replace')}` is {word[0].decode()}, which is no number in JSON (byte {start})"


def _is_json(body: bytes) -> bool:
    """Python's own parser lets half a surrogate pair through, msgspec calls it malformed. It is a wrong value."""
    try:
        json.loads(body.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class ClientConnection:
    """The client of one exchange, and what to do when it disconnects."""

    def __init__(self, tenant: str = "", abort: Callable[[], None] | None = None) -> None:
        self.tenant = tenant
        # Breaks the connection off. Hanging up is how we hear of it.
        self.abort = abort
        self._gone = False
        self._on_gone: Callable[[], None] | None = None

    def hang_up(self) -> None:
        self._gone = True
        if self._on_gone is not None:
            self._on_gone()

    def raise_if_gone(self) -> None:
        if self._gone:
            raise ClientGone

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_gone = callback

    def forget(self) -> None:
        """Nobody needs to know any more."""
        self._on_gone = self.abort = None


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        # Headers go through the framework, which adds to them. What follows need not.
        self._send_directly: Send = scope.get(DIRECT_SEND, send)
        self.tenant: str = scope.get(TENANT, "")
        self.route: str = scope.get(ROUTE, "")
        self.trace: RequestTrace | None = scope.get(TRACE)
        self.routed: RoutedRequest | None = scope.get(ROUTED)
        self._abort: Callable[[], None] | None = scope.get(ABORT)
        self._hold: Callable[[], None] | None = scope.get(HOLD)
        self._watch: Callable[[Callable[[], None]], Callable[[], None]] | None = scope.get(WATCH)
        self.write_at_once: Callable[[bytes], bool] | None = scope.get(WRITE)
        self.waits: Callable[[Callable[[], None]], bool] | None = scope.get(PACE)
        self._loop = asyncio.get_running_loop()
        # Bytes of the request's body, once it was read.
        self.body_size = 0
        # Since when something is being written; None while nothing is.
        self._writing_since: float | None = None
        # Checks whether the client reads.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def path_params(self) -> dict[str, str]:
        """The parts of the path that the route has names for."""
        found: dict[str, str] = self._scope.get("path_params", {})
        return found

    @property
    def query(self) -> dict[str, str]:
        """What stands after the question mark."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1")))

    @property
    def is_local(self) -> bool:
        """A program on this machine sent it: not a web page in a browser there, and not a proxy."""
        client = self._scope.get("client")
        names = {name for name, _ in self._scope["headers"]}
        return client is not None and is_loopback(client[0]) and not names & INDIRECT

    async def json(self, decoder: msgspec.json.Decoder[T], limit: int) -> T:
        """The request's body. No content type is asked for: curl's default says form data."""
        return decode(await self.body(limit), decoder)

    async def body(self, limit: int) -> bytes:
        limit += 0 if self.routed is None else self.routed.resume_len
        self._check_headers(limit)
        chunks = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise PayloadTooLarge(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                self.body_size = size
                body = b"".join(chunks)
                return body if self.routed is None else self.routed.take_sent(body)

    def _check_headers(self, limit: int) -> None:
        """What can be refused before any of the body is read."""
        for name, value in self._scope["headers"]:
            if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > limit):
                raise PayloadTooLarge(limit)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise CompressedBody(value.decode("latin-1")[:_SHOWN])

    @contextmanager
    def client(self) -> Iterator[ClientConnection]:
        """Watches for the client to stop reading, and to hang up, after its request was read."""
        client = ClientConnection(self.tenant, self._abort)
        unwatch = self._wait_for_end(client) if self._watch is None else self._watch(client.hang_up)
        self._timer = self._loop.call_later(WRITE_PATIENCE, self._look)
        try:
            yield client
        finally:
            unwatch()
            self._timer.cancel()
            # What they refer to refers to them, and is to be freed without a search for garbage.
            self._timer = None
            client.forget()

    def _look(self) -> None:
        """A client who takes nothing would keep its permit for ever. One timer is cheaper than one for each write."""
        since = self._writing_since
        if since is not None and self._loop.time() - since >= WRITE_PATIENCE and self._abort is not None:
            logger.warning(
                "A client reads too slowly: a write waited %.0f s for it; its request is cancelled", WRITE_PATIENCE
            )
            self._abort()
        else:
            self._timer = self._loop.call_later(WRITE_PATIENCE, self._look)

    def _wait_for_end(self, client: ClientConnection) -> Callable[[], object]:
        """For servers that tell of a client who hangs up only in `receive`. Returns what ends that."""

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            client.hang_up()

        return self._loop.create_task(wait()).cancel

    async def respond(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> None:
        await self.start({**headers, "content-length": str(len(body))}, status=status)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start(self, headers: Mapping[str, str], *, status: int = 200) -> None:
        encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self.start_raw(status, encoded)

    async def start_raw(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._hold is not None:
            self._hold()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        self._writing_since = self._loop.time()
        await self._send_directly({"type": "http.response.body", "body": data, "more_body": True})
        self._writing_since = None

    async def end(self, data: bytes = b"") -> None:
        """`data` are the last bytes of the body: written with its end, they are one packet."""
        self._writing_since = self._loop.time()
        await self._send_directly({"type": "http.response.body", "body": data, "more_body": False})
        self._writing_since = None
