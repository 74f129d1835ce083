"""What a server streams, as its client sees it: events, tokens and when they came. No I/O here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from legato.benchmark.serve.work import Api

Detail = str | dict[str, object] | None


class StreamError(Exception):
    """The server answered, and not with tokens. `kind` is what such answers are counted under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Stream:
    """One answer. `feed` takes its bytes as they come."""

    def __init__(self, api: Api) -> None:
        self._read: Callable[[Stream, bytes], None] = READERS[api]
        self._rest = b""
        self._now = 0.0
        self._last = 0.0
        self.first: float | None = None
        # Seconds between one token and the next; zero for two that came together.
        self.gaps: list[float] = []
        self.num_events = 0
        # What the server counted itself: an event may hold several tokens.
        self.num_told: int | None = None
        self.num_prompt: int | None = None
        self.complete = False

    @property
    def num_tokens(self) -> int:
        return self.num_events if self.num_told is None else self.num_told

    def feed(self, data: bytes, now: float) -> None:
        self._now = now
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    self._read(self, line[5:].strip())
                except msgspec.MsgspecError as error:
                    raise StreamError("malformed event", f"{error}: {line[:200].decode(errors='replace')}") from None

    def token(self) -> None:
        self.num_events += 1
        if self.first is None:
            self.first = self._now
        else:
            self.gaps.append(self._now - self._last)
        self._last = self._now


# ---- TGI ------------------------------------------------------------------------------------------------------------


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiEvent(msgspec.Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Detail = None


_decode_tgi = msgspec.json.Decoder(_TgiEvent).decode


def _read_tgi(stream: Stream, payload: bytes) -> None:
    event = _decode_tgi(payload)
    if event.error is not None:
        raise StreamError("error in the stream", _spell(event.error))
    if event.token is not None:
        stream.token()
    if event.generated_text is not None:
        stream.complete = True
    if event.details is not None:
        stream.num_told, stream.num_prompt = event.details.generated_tokens, event.details.input_length


# ---- OpenAI ---------------------------------------------------------------------------------------------------------


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
        """A chat begins with the role and ends with the reason, neither of which is a token. An empty text in the
        middle of a completion is one: half of a character."""
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)
        return bool(self.text) or self.finish_reason is None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _OpenAiEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Detail = None


_decode_openai = msgspec.json.Decoder(_OpenAiEvent).decode


def _read_openai(stream: Stream, payload: bytes) -> None:
    if payload == b"[DONE]":
        stream.complete = True
        return
    event = _decode_openai(payload)
    if event.error is not None:
        raise StreamError("error in the stream", _spell(event.error))
    if event.choices and event.choices[0].has_token:
        stream.token()
    if event.usage is not None:
        stream.num_told, stream.num_prompt = event.usage.completion_tokens, event.usage.prompt_tokens


READERS: dict[Api, Callable[[Stream, bytes], None]] = {
    "tgi": _read_tgi,
    "completions": _read_openai,
    "chat": _read_openai,
}


class _ErrorBody(msgspec.Struct):
    error: Detail = None
    message: str | None = None


def error_text(body: bytes) -> str:
    """The words in the body of a refusal, as the usual servers write them."""
    try:
        decoded = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")
    return (
        _spell(decoded.error) if decoded.error is not None else decoded.message or body[:200].decode(errors="replace")
    )


def _spell(error: Detail) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
