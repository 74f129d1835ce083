"""OpenTelemetry's exporter for our spans. Imported only when spans are exported.

Spans become protobuf messages directly: building the SDK's own spans first would take five times as long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as pb
from opentelemetry.sdk.trace.export import SpanExportResult

from legato import __version__
from legato.telemetry.tracing import Attribute, Span, SpanKind

_KINDS = {
    SpanKind.INTERNAL: int(pb.Span.SPAN_KIND_INTERNAL),
    SpanKind.SERVER: int(pb.Span.SPAN_KIND_SERVER),
    SpanKind.CLIENT: int(pb.Span.SPAN_KIND_CLIENT),
}
# Spans to encode before other threads have a turn: those of a request or two.
SPANS_PER_TURN = 16


class OtlpExporter(OTLPSpanExporter):
    """The connection, its headers, certificates and retries are the SDK's, and so are their environment variables."""

    def __init__(self, endpoint: str, resource: dict[str, Attribute], timeout: float) -> None:
        insecure = not endpoint.startswith("https://")
        super().__init__(endpoint=endpoint, insecure=insecure, timeout=timeout)
        self._resource_attributes = _attributes(resource)

    # The base class passes what `export` got to `_translate_data` and knows nothing else about it.

    def send(self, spans: Sequence[Span]) -> bool:
        return self.export(cast(Any, spans)) is SpanExportResult.SUCCESS

    def _translate_data(self, data: Any) -> ExportTraceServiceRequest:
        """Our spans as the base class sends them; called once for each attempt."""
        scope = pb.ScopeSpans(scope=InstrumentationScope(name="legato", version=__version__))
        for number, span in enumerate(data):
            _add(scope.spans, span)
            if number % SPANS_PER_TURN == 0:
                time.sleep(0)  # let the event loop have the interpreter lock
        resource = Resource(attributes=self._resource_attributes)
        return ExportTraceServiceRequest(resource_spans=[pb.ResourceSpans(resource=resource, scope_spans=[scope])])


def _add(messages: Any, span: Span) -> None:
    """In place: a message that is appended would be copied."""
    message = messages.add(
        name=span.name,
        trace_id=span.context.trace_id.to_bytes(16),
        span_id=span.context.span_id.to_bytes(8),
        parent_span_id=b"" if span.parent_id is None else span.parent_id.to_bytes(8),
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
    )
    if span.attributes:
        message.attributes.extend(_attributes(span.attributes))
    if span.error is not None:
        message.attributes.append(_attribute("error.type", span.error))
        message.status.code = pb.Status.STATUS_CODE_ERROR
    for event in span.events:
        added = message.events.add(name=event.name, time_unix_nano=event.time_ns)
        added.attributes.extend(_attributes(event.attributes))


def _attributes(attributes: dict[str, Attribute]) -> list[Any]:
    return [
        _attribute(name, value) if not isinstance(value, list) else _list_attribute(name, value)
        for name, value in attributes.items()
    ]


# Most attributes of most spans are the same: a message that is copied costs a tenth of one that is made.
@lru_cache(maxsize=4096, typed=True)
def _attribute(name: str, value: str | int | float | bool) -> Any:
    match value:
        case str():
            return KeyValue(key=name, value=AnyValue(string_value=value))
        case bool():
            return KeyValue(key=name, value=AnyValue(bool_value=value))
        case int():
            return KeyValue(key=name, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=name, value=AnyValue(double_value=value))


def _list_attribute(name: str, values: list[str]) -> Any:
    found = ArrayValue(values=[AnyValue(string_value=value) for value in values])
    return KeyValue(key=name, value=AnyValue(array_value=found))
