"""A client that costs little: one asyncio protocol per connection, httptools for HTTP, connections used again."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast

import httptools
import msgspec

from legato.benchmark.serve.stream import Stream, StreamError, error_text
from legato.benchmark.serve.work import Job, Target


class Record(msgspec.Struct, array_like=True):
    """One request as its client saw it. Moments are seconds after the start of the load."""

    due: float  # when it was to be sent
    late: float  # how much later it was
    latency: float  # from due to the end of the answer
    ttft: float | None = None
    num_tokens: int = 0
    num_prompt: int | None = None
    gaps: list[float] = []
    # What kind of failure, for counting, and in words. A failed request has no figures.
    error: str | None = None
    detail: str = ""

    @property
    def mean_gap(self) -> float | None:
        """Seconds a token after the first. The server's count of tokens decides: events may hold several."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class _Connection(asyncio.Protocol):
    """Carries one exchange at a time. The result is the finished stream, or StreamError."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._stream: Stream | None = None
        self._refusal: bytearray | None = None
        self._now = 0.0
        self.reusable = False
        self.touched = False  # whether anything of the answer has come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in everything but its bases

    async def exchange(self, request: bytes, stream: Stream, timeout: float) -> None:
        assert self._transport is not None
        self.reusable = self.touched = False
        if self._transport.is_closing():
            raise StreamError("connection lost", "the server closed it while nobody used it")
        loop = asyncio.get_running_loop()
        self._parser, self._stream, self._done = httptools.HttpResponseParser(self), stream, loop.create_future()
        self._refusal = None
        limit = loop.call_later(timeout, self._fail, StreamError("timeout", f"no end after {timeout:g} s"))
        try:
            self._transport.write(request)
            await self._done
        finally:
            limit.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's calls ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._now, self.touched = time.perf_counter(), True
        if self._parser is None:
            self.reusable = False  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except StreamError as error:
            self._fail(error)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, StreamError) else StreamError("malformed answer", repr(cause)))
        except httptools.HttpParserError as error:
            self._fail(StreamError("malformed answer", str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(StreamError("connection lost", str(exc or "the server closed it")))

    # ---- httptools' calls -----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() != 200:
            self._refusal = bytearray()

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            self._refusal += body
            return
        assert self._stream is not None
        self._stream.feed(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._stream is not None and self._done is not None
        self.reusable = self._parser.should_keep_alive()
        if self._refusal is not None:
            status = self._parser.get_status_code()
            raise StreamError(f"HTTP {status}", error_text(bytes(self._refusal)))
        if not self._stream.complete or not self._stream.num_events:
            what = f"after {self._stream.num_events} tokens" if self._stream.num_events else "without a token"
            raise StreamError("incomplete answer", f"the stream ended {what}")
        self._parser = None
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: StreamError) -> None:
        self._parser = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Client:
    """Sends jobs to one server."""

    def __init__(self, target: Target, started: float) -> None:
        self._target = target
        self._started = started
        self._idle: list[_Connection] = []
        self._open: set[Stream] = set()
        self._num_tokens = 0  # of answers that have ended
        self._tls = ssl.create_default_context() if target.tls else None

    async def request(self, job: Job, due: float) -> Record:
        """`due` is by `time.perf_counter`, as is what the client was told of the start."""
        sent = time.perf_counter()
        stream = Stream(self._target.api)
        record = Record(due - self._started, sent - due, 0.0)
        self._open.add(stream)
        try:
            await self._send(self._target.request(job), stream)
        except StreamError as error:
            record.error, record.detail = error.kind, str(error)
        finally:
            self._open.remove(stream)
            self._num_tokens += stream.num_events
        record.latency = time.perf_counter() - due
        if record.error is None:
            assert stream.first is not None
            record.ttft, record.num_tokens, record.gaps = stream.first - due, stream.num_tokens, stream.gaps
            record.num_prompt = stream.num_prompt
        return record

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """All that have come, also of answers that are not complete yet: progress, not a figure."""
        return self._num_tokens + sum(stream.num_events for stream in self._open)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _send(self, request: bytes, stream: Stream) -> None:
        """A connection that the server has closed while nobody used it says nothing about this request."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await self._exchange(connection, request, stream)
                return
            except StreamError as error:
                if error.kind != "connection lost" or connection.touched:
                    raise
        await self._exchange(await self._connect(), request, stream)

    async def _exchange(self, connection: _Connection, request: bytes, stream: Stream) -> None:
        try:
            await connection.exchange(request, stream, self._target.timeout)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> _Connection:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            connecting = loop.create_connection(_Connection, target.host, target.port, ssl=self._tls)
            _, connection = await asyncio.wait_for(connecting, target.timeout)
        except TimeoutError:
            raise StreamError("timeout", f"no connection after {target.timeout:g} s") from None
        except OSError as error:
            raise StreamError("cannot connect", str(error)) from None
        return connection
