"""Errors as Anthropic's clients expect them.

Claude Code shortens its conversation when it reads "prompt is too long", and waits when a server is overloaded.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.anthropic.responses import AnthropicError, AnthropicErrorDetails, AnthropicErrorObject
from legato.api.errors import InvalidRequest, Overloaded, RequestError, TooLong
from legato.http.routes.openai import errors as openai_errors
from legato.http.sse import named_event

PREFIX: Final = "/v1/messages"
_OVERLOADED: Final = 529
_NO_THREADS: Final = "thread_unsupported_request"
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
    return msgspec.json.encode(described(error))


def described(error: RequestError) -> AnthropicError:
    kind = _TYPES.get(status(error), "api_error")
    return AnthropicError(error=AnthropicErrorObject(type=kind, message=_message(error), details=_details(error)))


def event(error: RequestError) -> bytes:
    """The last thing that a stream says."""
    return named_event(described(error))


def no_threads() -> InvalidRequest:
    """Clients that hear this send the whole conversation again; a `thread` that is ignored would lose it."""
    problem = "`thread` is not supported by this server: send the whole conversation"
    return InvalidRequest(problem, "thread", _NO_THREADS)


def _details(error: RequestError) -> AnthropicErrorDetails | UnsetType:
    if isinstance(error, InvalidRequest) and error.code == _NO_THREADS:
        return AnthropicErrorDetails(error_code=_NO_THREADS)
    return UNSET


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
