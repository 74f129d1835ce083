"""The HTTP client of the load: one asyncio protocol per connection, httptools, keep-alive; it must not be the limit."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec

from legato.benchmark.serve.work import LoadRequest, Target


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are in seconds, `due` counts from the start of the load."""

    due: float  # when it was to be sent
    late: float  # how much later it was sent
    latency: float  # from due to the end of the answer
    ttft: float | None = None
    num_tokens: int = 0
    num_prompt: int | None = None
    gaps: list[float] = field(default_factory=list)
    # The kind of failure, for counting, and its message. A failed request has no figures.
    error: str | None = None
    detail: str = ""

    @property
    def mean_gap(self) -> float | None:
        """Seconds per token after the first, by the server's count of tokens: events may hold several."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None


# ---- server-sent events ---------------------------------------------------------------------------------------------

ErrorDetail = str | dict[str, object] | None


class StreamError(Exception):
    """A request failed. `kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    generated_tokens: int | None = None
    input_length: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """A chat begins with the role and ends with the finish reason; neither is a token. An empty text within a
        completion is one: an incomplete character."""
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)
        return bool(self.text) or self.finish_reason is None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    """An event or an error body, as far as it matters here, of any of the APIs."""

    # TGI
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    # OpenAI
    choices: list[_Choice] = []
    usage: _Usage | None = None
    # Both
    error: ErrorDetail = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


def error_text(body: bytes) -> str:
    """The message in the body of an error response."""
    text = body[:200].decode(errors="replace")
    try:
        event = _decode(body)
    except msgspec.MsgspecError:
        return text
    return event.message or text if event.error is None else _message(event.error)


def _message(error: ErrorDetail) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class TokenStream:
    """The tokens of one answer and when they arrived. No I/O: `feed` takes the bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._now = 0.0
        self._last = 0.0
        self.first: float | None = None
        # Seconds from each token to the next; zero for two that arrive together.
        self.gaps: list[float] = []
        self.num_events = 0
        # The server's own counts: an event may hold several tokens.
        self.num_generated: int | None = None
        self.num_prompt: int | None = None
        self.complete = False

    @property
    def num_tokens(self) -> int:
        return self.num_events if self.num_generated is None else self.num_generated

    def feed(self, data: bytes, now: float) -> None:
        self._now = now
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    self._read(line[5:].strip())
                except msgspec.MsgspecError as error:
                    raise StreamError("malformed event", f"{error}: {line[:200].decode(errors='replace')}") from None

    def _read(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.complete = True
            return
        event = _decode(payload)
        if event.error is not None:
            raise StreamError("error in the stream", _message(event.error))
        if event.token is not None or (event.choices and event.choices[0].has_token):
            self._add_token()
        if event.generated_text is not None:
            self.complete = True
        if event.details is not None:
            self.num_generated, self.num_prompt = event.details.generated_tokens, event.details.input_length
        if event.usage is not None:
            self.num_generated, self.num_prompt = event.usage.completion_tokens, event.usage.prompt_tokens

    def _add_token(self) -> None:
        self.num_events += 1
        if self.first is None:
            self.first = self._now
        else:
            self.gaps.append(self._now - self._last)
        self._last = self._now


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """One exchange at a time, which ends with a complete stream or raises StreamError."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._stream: TokenStream | None = None
        self._refusal: bytearray | None = None
        self._now = 0.0
        self.reusable = False
        self.touched = False  # whether any byte of the answer has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in everything but its bases

    async def exchange(self, request: bytes, stream: TokenStream, timeout: float) -> None:
        assert self._transport is not None
        self.reusable = self.touched = False
        if self._transport.is_closing():
            raise StreamError("connection lost", "the server closed it while it was idle")
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

    # ---- callbacks of asyncio -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._now, self.touched = time.perf_counter(), True
        if self._parser is None:
            self.reusable = False  # unsolicited data
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

    # ---- callbacks of httptools -----------------------------------------------------------------------------------

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


class LoadClient:
    """Sends requests to one server over connections that it keeps open."""

    def __init__(self, target: Target, started: float) -> None:
        self._target = target
        self._started = started
        self._idle: list[_Connection] = []
        self._open: set[TokenStream] = set()
        self._num_tokens = 0  # of answers that have ended
        self._tls = ssl.create_default_context() if target.tls else None

    async def send(self, request: LoadRequest, due: float) -> Record:
        """`due` is a `time.perf_counter`, as is the start."""
        sent = time.perf_counter()
        stream = TokenStream()
        record = Record(due - self._started, sent - due, 0.0)
        self._open.add(stream)
        try:
            await self._exchange_on_any(self._target.encode(request), stream)
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
        """Received so far, including those of incomplete answers."""
        return self._num_tokens + sum(stream.num_events for stream in self._open)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _exchange_on_any(self, request: bytes, stream: TokenStream) -> None:
        """Tries the next connection if the server has closed one that was idle: the request was not seen."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await self._exchange(connection, request, stream)
                return
            except StreamError as error:
                if error.kind != "connection lost" or connection.touched:
                    raise
        await self._exchange(await self._connect(), request, stream)

    async def _exchange(self, connection: _Connection, request: bytes, stream: TokenStream) -> None:
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
