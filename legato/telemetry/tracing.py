"""Spans as plain data. `export.py` turns them into OpenTelemetry's, in another thread."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

Attribute: TypeAlias = str | int | float | bool | list[str]

# https://www.w3.org/TR/trace-context/: version, trace, span, flags. Later versions may append more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
SERVICE = "generate.v3.TextGenerationService"
# What every call of a shard says of itself, as TGI's spans do.
RPC: dict[str, Attribute] = {"rpc.system": "grpc", "rpc.service": SERVICE, "net.transport": "unix"}


class SpanKind(Enum):
    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class TraceContext(NamedTuple):
    """Where a span belongs: its trace, and its own number there."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """None unless `header` is a valid `traceparent`."""
        match = _TRACEPARENT.fullmatch(header.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        return cls(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None

    @classmethod
    def root(cls) -> TraceContext:
        return cls(random.getrandbits(128) or 1, new_span_id())

    def child(self) -> TraceContext:
        return TraceContext(self.trace_id, new_span_id(), self.sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"


def new_span_id() -> int:
    return random.getrandbits(64) or 1


class SpanEvent(NamedTuple):
    name: str
    time_ns: int
    attributes: dict[str, Attribute]


@dataclass(slots=True)
class Span:
    """Times in nanoseconds since 1970."""

    name: str
    context: TraceContext
    parent_id: int | None
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: dict[str, Attribute] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    # The class of the error that ended it.
    error: str | None = None


class WallClock:
    """Monotonic seconds as nanoseconds since 1970, so that the spans of a request keep their order. One for each
    request: the time of day is set, and goes on while a machine is suspended."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic: float) -> int:
        return self._offset_ns + int(monotonic * 1e9)
