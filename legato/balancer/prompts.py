"""Extracts the prompt text from a request body, in the order in which the prefix cache sees it.

Everything else of the body is passed on unread. A body that is not JSON is passed on, too: the server says what is
wrong with it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

# Paths whose bodies have a prompt.
GENERATING = frozenset(
    {
        "/",
        "/generate",
        "/generate_stream",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/invocations",
        "/vertex",
    }
)
_NOTHING = Raw(b"")


class _Parameters(Struct):
    adapter_id: Raw = _NOTHING


class _Body(Struct):
    """In the order in which chat templates put them: tools and instructions first."""

    model: Raw = _NOTHING
    parameters: _Parameters | None = None
    tools: Raw = _NOTHING
    system: Raw = _NOTHING
    instructions: Raw = _NOTHING
    messages: Raw = _NOTHING
    prompt: Raw = _NOTHING
    inputs: Raw = _NOTHING
    input: Raw = _NOTHING
    previous_response_id: str | None = None


class Prompt(Struct, frozen=True):
    # The model or adapter: what it computes of the same text is not the same.
    model: bytes = b""
    text: bytes = b""
    # The response that this one follows; only the replica that stored it knows it.
    previous_response_id: str | None = None


NO_PROMPT = Prompt()
_decoder = msgspec.json.Decoder(_Body)


def prompt_of(body: bytes) -> Prompt:
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_PROMPT
    adapter = b"" if found.parameters is None else bytes(found.parameters.adapter_id)
    parts = (found.tools, found.system, found.instructions, found.messages, found.prompt, found.inputs, found.input)
    # Without the bracket or quote at its end a conversation begins like the one that it was a turn ago.
    text = b"\n".join(bytes(part).rstrip(b']"} \n\r\t') for part in parts if part)
    return Prompt(bytes(found.model) + b"\n" + adapter, text, found.previous_response_id)
