"""An OTLP collector: the gRPC service of `opentelemetry-proto`, and what it was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc


@dataclass(frozen=True)
class Received:
    """One span, in plain values."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: bool
    resource: dict[str, Any]


class Collector(service_grpc.TraceServiceServicer):
    """`delay` seconds before every answer, which is an error if `code` is set."""

    def __init__(self, delay: float = 0.0, code: grpc.StatusCode | None = None) -> None:
        self.delay = delay
        self.code = code
        self.num_calls = 0
        self._spans: list[Received] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.num_calls += 1
        time.sleep(self.delay)
        if self.code is not None:
            context.abort(self.code, "no")
        with self._lock:
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                self._spans += [_received(span, resource) for scope in group.scope_spans for span in scope.spans]
        return service.ExportTraceServiceResponse()


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        span.status.code == 2,
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting(collector: Collector, port: int = 0) -> Iterator[str]:
    """The collector behind a port; its endpoint."""
    server = grpc.server(ThreadPoolExecutor(4))
    service_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)
