"""Errors as OpenAI's clients expect them.

Where the native API says 422, OpenAI's says 400, and their client raises another exception for it. A generation that
failed is 500 there, which their client tries again; the native 424 it would not. Chat templates keep TGI's 422. The
native `error_type` stands beside the error object, for TGI's own client, which reads nothing else.
"""

from __future__ import annotations

import re

import msgspec

from legato.api.errors import (
    GenerationFailed,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    RequestError,
    TooLong,
    UnknownModel,
)
from legato.api.openai.responses import ErrorObject, OpenAIError
from legato.http.auth import Unauthorized

# msgspec's messages say where: "Object missing required field `prompt`", "Expected `str`, got `int` - at `$.model`",
# "... - at `key` in `$.logit_bias`".
_PLACE = re.compile(r"required field `(?P<missing>\w+)`$| - at (`key` in )?`\$\.?(?P<wrong>[^`]*)`$")


def unsupported(param: str, reason: str = "") -> InvalidRequest:
    """A field of OpenAI's API that this server does not implement, or, for a `reason`, not with this model."""
    problem = f"`{param}` is not supported" + (f": {reason}" if reason else " by this server")
    return InvalidRequest(problem, param, "unsupported_parameter")


def status(error: RequestError) -> int:
    if isinstance(error, InvalidRequest):
        return 400
    return 500 if isinstance(error, GenerationFailed) else error.status


def body(error: RequestError) -> bytes:
    described = ErrorObject(message=message(error), type=_type(error), param=_param(error), code=_code(error))
    return msgspec.json.encode(OpenAIError(error=described, error_type=error.error_type))


def event(error: RequestError) -> bytes:
    """The last thing that a stream says."""
    return b"data: %b\n\n" % body(error)


def message(error: RequestError) -> str:
    if isinstance(error, TooLong):
        # Programs look for the words "maximum context length".
        limit = f"{error.limit} tokens" if error.max_new_tokens is not None else f"{error.limit} tokens of input"
        output = f" and asks for {error.max_new_tokens} of output" if error.max_new_tokens else ""
        return f"This model's maximum context length is {limit}, and the request has {error.input_len} of input{output}"
    return error.problem if isinstance(error, InvalidRequest) else str(error)


def _type(error: RequestError) -> str:
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    return "server_error" if status(error) >= 500 else "invalid_request_error"


def _param(error: RequestError) -> str | None:
    if not isinstance(error, InvalidRequest):
        return None
    if error.param is None and (place := _PLACE.search(error.problem)):
        return place["missing"] or place["wrong"] or None
    return error.param


def _code(error: RequestError) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.code
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    if isinstance(error, UnknownModel):
        return "model_not_found"
    if isinstance(error, Unauthorized):
        return "invalid_api_key"
    return "invalid_json" if isinstance(error, MalformedBody) else None
