"""Errors as Anthropic's clients expect them.

Claude Code shortens its conversation when it reads "prompt is too long", and waits when a server is overloaded.
"""

from __future__ import annotations

from typing import Final

import msgspec

from legato.api.anthropic.responses import AnthropicError, AnthropicErrorObject
from legato.api.errors import InvalidRequest, Overloaded, RequestError, TooLong
from legato.http.routes.openai import errors as openai_errors

PREFIX: Final = "/v1/messages"
_OVERLOADED: Final = 529
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def status(error: RequestError) -> int:
    if isinstance(error, Overloaded):
        return _OVERLOADED
    found = openai_errors.status(error)
    return 400 if found == 422 else found


def body(error: RequestError) -> bytes:
    described = AnthropicErrorObject(type=_TYPES.get(status(error), "api_error"), message=_message(error))
    return msgspec.json.encode(AnthropicError(error=described))


def event(error: RequestError) -> bytes:
    """The last thing that a stream says."""
    return b"event: error\ndata: %b\n\n" % body(error)


def _message(error: RequestError) -> str:
    if isinstance(error, TooLong) and error.max_new_tokens:
        total = f"{error.input_len} + {error.max_new_tokens} > {error.limit}"
        cure = "decrease input length or `max_tokens` and try again"
        return f"input length and `max_tokens` exceed context limit: {total}, {cure}; prompt is too long"
    if isinstance(error, TooLong):
        return f"prompt is too long: {error.input_len} tokens > {error.limit} maximum"
    if isinstance(error, InvalidRequest):
        return error.problem
    return str(error)
