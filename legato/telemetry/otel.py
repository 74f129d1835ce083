"""Our spans as OpenTelemetry's. Imported only when spans are exported."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from legato import __version__
from legato.telemetry.tracing import Span

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status(StatusCode.UNSET)


class SpanConverter:
    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("legato", __version__)

    def __call__(self, span: Span) -> ReadableSpan:
        trace_id = span.context.trace_id
        parent = None if span.parent_id is None else SpanContext(trace_id, span.parent_id, True, _SAMPLED)
        attributes = span.attributes if span.error is None else {**span.attributes, "error.type": span.error}
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, span.context.span_id, False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
            kind=SpanKind[span.kind.value],
            status=_OK if span.error is None else Status(StatusCode.ERROR),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
