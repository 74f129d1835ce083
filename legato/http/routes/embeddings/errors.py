"""Errors of TEI's routes: its words for `error_type`, and what only these routes refuse."""

from __future__ import annotations

import msgspec

from legato.api.errors import InvalidRequest, RequestError
from legato.api.native import ErrorResponse

TEI_PATHS = frozenset({"/embed", "/rerank", "/predict"})
# The native words for the same. Others have none in TEI and stay.
_WORDS = {
    "validation": "Validation",
    "overloaded": "Overloaded",
    "generation": "Backend",
    "healthcheck": "Unhealthy",
    "draining": "Unhealthy",
}


class WrongHead(RequestError):
    """The model embeds and should classify, or the other way round. TEI's status."""

    status, error_type = 424, "generation"


class EmptyBatch(InvalidRequest):
    """No text at all. TEI's status is 400, OpenAI's too."""


def status(error: RequestError) -> int:
    return 400 if isinstance(error, EmptyBatch) else error.status


def body(error: RequestError) -> bytes:
    word = "Empty" if isinstance(error, EmptyBatch) else _WORDS.get(error.error_type, error.error_type)
    return msgspec.json.encode(ErrorResponse(error=str(error), error_type=word))
