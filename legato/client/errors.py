"""Errors of a request.

    ClientError
    ├── ConnectionFailed               refused, or closed before the answer was complete
    │   └── RequestTimeout             nothing received for longer than the client's timeout
    └── AnswerError                    the answer is an error; `status` is its HTTP status
        ├── ValidationError            the request is invalid
        ├── GenerationError            the model failed
        ├── IncompleteGenerationError  a stream ended before its last event
        ├── BadRequestError            400
        ├── UnauthorizedError          401   API key missing or wrong
        ├── NotFoundError              404
        ├── RateLimitExceededError     429
        │   └── OverloadedError              the server is overloaded; see `retry_after`
        ├── UnavailableError           503
        ├── ShardNotReadyError         403, 424
        ├── ShardTimeoutError          504
        └── UnknownError               anything else

The server's `error_type` decides first and the status second, as in TGI's client, whose names these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ClientError(Exception):
    pass


class ConnectionFailed(ClientError):
    pass


class RequestTimeout(ConnectionFailed, TimeoutError):
    pass


class AnswerError(ClientError):
    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        # Seconds after which to try again, if the server says so.
        self.retry_after = retry_after


class ValidationError(AnswerError):
    pass


class GenerationError(AnswerError):
    pass


class IncompleteGenerationError(AnswerError):
    pass


class BadRequestError(AnswerError):
    pass


class UnauthorizedError(AnswerError):
    pass


class NotFoundError(AnswerError):
    pass


class RateLimitExceededError(AnswerError):
    pass


class OverloadedError(RateLimitExceededError):
    pass


class UnavailableError(AnswerError):
    pass


class ShardNotReadyError(AnswerError):
    pass


class ShardTimeoutError(AnswerError):
    pass


class UnknownError(AnswerError):
    pass


_BY_TYPE: dict[str, type[AnswerError]] = {
    "validation": ValidationError,
    "template_error": ValidationError,
    "missing_template_variable": ValidationError,
    "tool_error": ValidationError,
    "generation": GenerationError,
    "incomplete_generation": IncompleteGenerationError,
    "incomplete_generation_stream": IncompleteGenerationError,
    "overloaded": OverloadedError,
}
_BY_STATUS: dict[int, type[AnswerError]] = {
    400: BadRequestError,
    401: UnauthorizedError,
    403: ShardNotReadyError,
    404: NotFoundError,
    422: ValidationError,
    424: ShardNotReadyError,
    429: RateLimitExceededError,
    503: UnavailableError,
    504: ShardTimeoutError,
}


class _ErrorObject(msgspec.Struct):
    """OpenAI's; TGI adds the status within streams."""

    message: str
    http_status_code: int | None = None


class _ErrorBody(msgspec.Struct):
    error: str | _ErrorObject
    error_type: Any = None


def error_from(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> AnswerError:
    """The exception for an error response. It may come from a proxy, so the body may be anything."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = _ErrorBody(error=body.decode(errors="replace")[:500] or f"an empty response with status {status}")
    if isinstance(found.error, str):
        message = found.error
    else:
        message, status = found.error.message, found.error.http_status_code or status
    kind = _BY_TYPE.get(str(found.error_type)) or _BY_STATUS.get(status, UnknownError)
    return kind(message, status, _seconds((headers or {}).get("retry-after")))


def _seconds(retry_after: str | None) -> float | None:
    """None for a date as well, which neither TGI nor Legato sends."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
