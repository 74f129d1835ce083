"""The errors of requests. Each class has its HTTP status and the `error_type` that TGI's clients expect.

RequestError
├── MalformedBody      400   not JSON
├── NotFound           404
│   ├── UnknownAdapterId     no such LoRA adapter is loaded
│   ├── UnknownModel         the same, in OpenAI's API
│   └── WrongTask            a route of servers that do something else with texts
├── MethodNotAllowed   405
├── PayloadTooLarge    413
├── CompressedBody     415
├── InvalidRequest     422   JSON, but not a request we can serve
│   └── TooLong              more tokens than the model takes
├── GenerationFailed   424   a shard failed under it
│   └── ServerLost           this server computes nothing any more
├── Overloaded         429
├── InternalError      500   a bug of ours
├── Unhealthy          503
├── Draining           503   will be stopped soon
└── TimedOut           504   waited or ran longer than the operator allows

The routes of OpenAI's API put the same errors into OpenAI's words and status codes (`openai/errors.py`).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from legato.api.native import ErrorResponse


class RequestError(Exception):
    """Answered to the client as `{"error": message, "error_type": ...}`."""

    status: ClassVar[int]
    error_type: ClassVar[str]
    headers: ClassVar[dict[str, str]] = {}

    @property
    def counted_as(self) -> str:
        """The reason under which the metrics count it."""
        return self.error_type

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(error=str(self), error_type=self.error_type))


class MalformedBody(RequestError):
    status, error_type = 400, "validation"

    def __init__(self, cause: str) -> None:
        super().__init__(f"Failed to parse the request body as JSON: {cause}")


class NotFound(RequestError):
    status, error_type = 404, "not_found"

    @property
    def counted_as(self) -> str:
        """A request that names an adapter which does not exist is the client's mistake."""
        return "validation"


class UnknownAdapterId(NotFound):
    """Never the base model instead."""

    def __init__(self, name: str) -> None:
        super().__init__(f"`adapter_id` is unknown: no adapter {name!r} is loaded")


class UnknownModel(NotFound):
    """Of OpenAI's API: neither the model that is served nor an adapter."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist")


class WrongTask(NotFound):
    """`task` is the one that the route needs."""

    def __init__(self, path: str, task: str) -> None:
        is_generation = task == "generate"
        does, needs = ("embeds texts", "generates text") if is_generation else ("generates text", "embeds texts")
        super().__init__(f"This server {does}: {path} needs one that {needs}, started with --task {task}")


class MethodNotAllowed(RequestError):
    status, error_type = 405, "method_not_allowed"


class PayloadTooLarge(RequestError):
    status, error_type = 413, "validation"
    # The rest of the body is not read, so the connection cannot be used again.
    headers: ClassVar = {"connection": "close"}

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than the limit of {limit} bytes")


class CompressedBody(RequestError):
    """A few bytes may stand for any number, so nothing is ever unpacked."""

    status, error_type = 415, "validation"
    headers: ClassVar = {"connection": "close", "accept-encoding": "identity"}

    def __init__(self, encoding: str) -> None:
        super().__init__(f"The request body is encoded as {encoding!r}; send it uncompressed, without Content-Encoding")


class InvalidRequest(RequestError):
    """`param` is the field that is wrong and `code` a word for programs: OpenAI's error object has places for them."""

    status, error_type = 422, "validation"

    def __init__(self, problem: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(f"Input validation error: {problem}")
        self.problem = problem
        self.param = param
        self.code = code


class TooLong(InvalidRequest):
    """The prompt together with what is to follow, or (`max_new_tokens` is None) the prompt for a limit of its own."""

    def __init__(self, problem: str, *, limit: int, input_len: int, max_new_tokens: int | None = None) -> None:
        super().__init__(problem, code="context_length_exceeded")
        self.limit = limit
        self.input_len = input_len
        self.max_new_tokens = max_new_tokens


class GenerationFailed(RequestError):
    status, error_type = 424, "generation"

    def __init__(self, cause: str) -> None:
        super().__init__(f"Request failed during generation: {cause}")


class ServerLost(GenerationFailed):
    """A balancer in front of several servers recognises the header and continues on another server."""

    headers: ClassVar = {"x-legato-route": "lost"}


class Overloaded(RequestError):
    status, error_type = 429, "overloaded"

    def __init__(self, retry_after: int = 1) -> None:
        """In seconds."""
        super().__init__("Model is overloaded")
        self.headers = {"retry-after": str(retry_after)}  # type: ignore[misc]  # others say the same every time


class InternalError(RequestError):
    status, error_type = 500, "internal"

    def __init__(self) -> None:
        super().__init__("Internal server error")


class Unhealthy(RequestError):
    status, error_type = 503, "healthcheck"

    def __init__(self, cause: str = "unhealthy") -> None:
        super().__init__(cause)


class Draining(RequestError):
    """The server will be stopped. Another replica may take the request."""

    status, error_type = 503, "draining"
    headers: ClassVar = {"retry-after": "1"}

    def __init__(self) -> None:
        super().__init__("The server is draining: it finishes its requests and admits no more")


class TimedOut(RequestError):
    status, error_type = 504, "timeout"


class ClientGone(Exception):
    """The client has disconnected."""
