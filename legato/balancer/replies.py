"""The balancer's response to a client: writes the parts of a replica's response once and in order."""

from __future__ import annotations

from legato.api.errors import RequestError
from legato.balancer.answers import Headers
from legato.balancer.calls import returned
from legato.http.exchange import Exchange
from legato.http.routes.anthropic import errors as anthropic_errors
from legato.http.routes.openai import errors as openai_errors

OPENAI_PREFIX = "/v1/"
# Statuses whose answers have no body, and no length of one.
WITHOUT_BODY = (204, 304)


class Reply:
    def __init__(self, exchange: Exchange, path: str) -> None:
        self._exchange = exchange
        self._path = path
        # Writes more of a body that has begun, without waiting; False if it could not.
        self.write_at_once = exchange.write_at_once
        self.has_started = False
        # Whether anything of a body went out, and whether all of it did.
        self.has_begun = self._has_ended = False

    async def start(self, status: int, headers: Headers) -> None:
        """Once; what later replicas would start with is the same."""
        if not self.has_started:
            self.has_started = True
            await self._exchange.start_raw(status, returned(headers))

    async def write(self, data: bytes) -> None:
        self.has_begun = True
        await self._exchange.write(data)

    async def end(self, data: bytes = b"") -> None:
        """`data` are the last bytes. A reply that has ended stays as it is."""
        if not self._has_ended:
            self.has_begun = self._has_ended = True
            await self._exchange.end(data)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer. To HEAD, `headers` have the length of what GET would answer."""
        if status not in WITHOUT_BODY and all(name != b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self.start(status, headers)
        await self.end(body)

    async def fail(self, error: RequestError) -> None:
        """As a status if none went out, else as the last event of the stream."""
        if self.has_started:
            await self.end(self._event(error))
            return
        status, body = self._refusal(error)
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self.respond(status, [*headers, (b"content-type", b"application/json")], body)

    def _refusal(self, error: RequestError) -> tuple[int, bytes]:
        if self._path.startswith(anthropic_errors.PREFIX):
            return anthropic_errors.status(error), anthropic_errors.body(error)
        if self._path.startswith(OPENAI_PREFIX):
            return openai_errors.status(error), openai_errors.body(error)
        return error.status, error.body

    def _event(self, error: RequestError) -> bytes:
        if self._path.startswith(anthropic_errors.PREFIX):
            return anthropic_errors.event(error)
        if self._path.startswith(OPENAI_PREFIX):
            return openai_errors.event(error)
        return b"data: %b\n\n" % error.body
