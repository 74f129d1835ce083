"""A shard's own spans, which join the traces of the router: one for each step with a traced prompt, and for each call.

There is one of these only with `--otlp-endpoint`. Decodes have no spans here: the router's decode span has their times.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

import grpc

from legato.common.options import ServerOptions
from legato.pb import generate_pb2 as pb
from legato.telemetry.export import SpanExport, open_export
from legato.telemetry.tracing import RPC, Attribute, Span, SpanKind, TraceContext


class ShardSpans(grpc.aio.ServerInterceptor):
    def __init__(self, export: SpanExport) -> None:
        self._export = export

    @classmethod
    def open(cls, options: ServerOptions) -> ShardSpans | None:
        if options.otlp_endpoint is None:
            return None
        return cls(open_export(options.otlp_endpoint, options.otlp_service_name, f"shard-{options.rank}"))

    def close(self, seconds: float) -> None:
        self._export.close(seconds)

    def step(self, request: pb.StepRequest, answer: Awaitable[pb.StepResponse]) -> Awaitable[pb.StepResponse]:
        """The same answer; when it is there, the spans of the step are, too."""
        return _TracedAnswer(self, request, answer, time.time_ns())

    def record(self, request: pb.StepRequest, response: pb.StepResponse, start_ns: int) -> None:
        now = time.time_ns()
        num_tokens = dict(zip(request.rows, request.num_tokens, strict=True))
        spans: list[Span] = []
        for traced in request.traces:
            parent = TraceContext.parse(traced.traceparent)
            if parent is None:
                continue
            context = parent.child()
            attributes: dict[str, Attribute] = {**RPC, "rpc.method": "Tokens", "legato.step": request.id}
            details: dict[str, Attribute] = {
                "legato.num_tokens": num_tokens.get(traced.row, 0),
                "legato.batch_size": len(request.rows),
                "legato.step_tokens": sum(request.num_tokens),
            }
            error = "step_failed" if response.HasField("error") else None
            spans.append(
                Span("Tokens", context, parent.span_id, start_ns, now, SpanKind.SERVER, attributes, error=error)
            )
            # The device may have been busy with the step before: the forward pass is the end of this time.
            forward_ns = max(start_ns, now - response.forward_ns)
            spans.append(
                Span(
                    "generate_token", context.child(), context.span_id, forward_ns, now, attributes=details, error=error
                )
            )
        self._export.add(spans)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """A span for each unary call; its parent is in the metadata, where TGI's router puts it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        metadata = dict(handler_call_details.invocation_metadata or ())
        parent = TraceContext.parse(str(metadata.get("traceparent", "")))
        if parent is None and method == "Health":  # asked for all the time
            return handler
        call: Any = handler.unary_unary

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            start_ns, error = time.time_ns(), None
            try:
                return await call(request, context)
            except BaseException as failure:
                error = type(failure).__name__
                raise
            finally:
                attributes: dict[str, Attribute] = {**RPC, "rpc.method": method}
                attributes["rpc.grpc.status_code"] = _status(context)
                attributes["rpc.user_agent"] = str(metadata.get("user-agent", ""))
                own = TraceContext.root() if parent is None else parent.child()
                parent_id = None if parent is None else parent.span_id
                now = time.time_ns()
                self._export.add(
                    [Span(method, own, parent_id, start_ns, now, SpanKind.SERVER, attributes, error=error)]
                )

        return grpc.unary_unary_rpc_method_handler(traced, handler.request_deserializer, handler.response_serializer)


def _status(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    code: Any = context.code() or 0
    return int(code.value[0] if isinstance(code, grpc.StatusCode) else code)


@dataclass(frozen=True, slots=True)
class _TracedAnswer:
    spans: ShardSpans
    request: pb.StepRequest
    answer: Awaitable[pb.StepResponse]
    start_ns: int

    def __await__(self) -> Generator[Any, None, pb.StepResponse]:
        response = yield from self.answer.__await__()
        self.spans.record(self.request, response, self.start_ns)
        return response
