"""The bytes of a stream's events.

Most of an event never changes during a stream, so it is encoded once; per token, one text is encoded and a few parts
are put together. What comes out is what encoding the structs in `responses.py` would give, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from legato.api.openai.responses import ChatLogprobs, CompletionLogprobs, FinishReason, ToolCallDelta, Usage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Identity:
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Envelope:
    """The part around the choices. `tail` closes a chunk and says the usage, where the client wants to hear of it."""

    def __init__(self, identity: Identity, kind: str, *, with_usage: bool) -> None:
        self.head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            _encode(identity.id),
            _encode(kind),
            identity.created,
            _encode(identity.model),
            _encode(identity.system_fingerprint),
        )
        self.tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def show(self, usage: Usage) -> None:
        """From now on, chunks carry this."""
        self.tail = b'],"usage":%b}\n\n' % _encode(usage)

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices."""
        self.show(usage)
        return self.head + self.tail


class CompletionChunks:
    """The chunks of one choice of a completion."""

    def __init__(self, envelope: Envelope, index: int) -> None:
        self._envelope = envelope
        self._head = envelope.head + b'{"index":%d,"text":' % index

    def text(self, text: str, logprobs: CompletionLogprobs | None = None) -> bytes:
        end = b',"logprobs":null,"finish_reason":null}'
        if logprobs is not None:
            end = b',"logprobs":%b,"finish_reason":null}' % _encode(logprobs)
        return b"".join((self._head, _encode(text), end, self._envelope.tail))

    def finish(
        self, text: str, logprobs: CompletionLogprobs | None, reason: FinishReason, usage: Usage | None = None
    ) -> bytes:
        """The last one, which may have text, too, and its own `usage`."""
        end = b',"logprobs":%b,"finish_reason":%b}' % (_encode(logprobs), _encode(reason))
        tail = self._envelope.tail if usage is None else b'],"usage":%b}\n\n' % _encode(usage)
        return b"".join((self._head, _encode(text), end, tail))


class ChatChunks:
    """The chunks of one choice of a chat."""

    def __init__(self, envelope: Envelope, index: int) -> None:
        self._envelope = envelope
        self._head = envelope.head + b'{"index":%d,"delta":{' % index
        self._content = self._head + b'"content":'

    def role(self) -> bytes:
        """The first one."""
        delta = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._head + delta + self._envelope.tail

    def content(self, text: str, logprobs: ChatLogprobs | None = None) -> bytes:
        end = b'},"logprobs":null,"finish_reason":null}'
        if logprobs is not None:
            end = b'},"logprobs":%b,"finish_reason":null}' % _encode(logprobs)
        return b"".join((self._content, _encode(text), end, self._envelope.tail))

    def reasoning(self, text: str) -> bytes:
        """Under both names."""
        encoded, end = _encode(text), b'},"logprobs":null,"finish_reason":null}'
        parts = (self._head, b'"reasoning":', encoded, b',"reasoning_content":', encoded, end, self._envelope.tail)
        return b"".join(parts)

    def call(self, delta: ToolCallDelta) -> bytes:
        end = b']},"logprobs":null,"finish_reason":null}'
        return b"".join((self._head, b'"tool_calls":[', _encode(delta), end, self._envelope.tail))

    def finish(self, reason: FinishReason) -> bytes:
        """The last one. Clients of TGI add up the contents of all chunks, so that this one has an empty content."""
        delta = b"" if reason == "tool_calls" else b'"content":""'
        return b'%b%b},"logprobs":null,"finish_reason":%b}%b' % (
            self._head,
            delta,
            _encode(reason),
            self._envelope.tail,
        )
