"""Traces of requests. One layer around the application, which is there only with `--otlp-endpoint`.

    POST /generate                       the HTTP exchange; its parent comes in `traceparent`, which is answered too
      generate                           the handler: TGI's attributes and OpenTelemetry's for generative AI
        validate
        queued                           each sequence: in the queue,
        infer                            and from there to its last token
          prefill                        each prompt chunk: from sending its step to having the result
            Tokens, generate_token       the shard's own spans
          decode                         from the first token to the last, with steps as events

Spans are made when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.api.errors import ClientGone, RequestError
from legato.http.exchange import DIRECT_SEND, ROUTE, TRACE
from legato.http.scheduler import SchedulerClient
from legato.http.streams import Stream, Transcript
from legato.http.telemetry.request_log import span_name, success_fields
from legato.http.telemetry.traced_stream import TracedStream
from legato.http.validation import ValidRequest
from legato.scheduling.state import GenerationRequest
from legato.telemetry.export import SpanExport
from legato.telemetry.metrics import Timings
from legato.telemetry.tracing import Attribute, Span, SpanKind, TraceContext, WallClock

CHATS = frozenset({"chat_completions"})


class TracedRequests:
    """Outermost. Requests that their caller does not want sampled pass by."""

    def __init__(self, app: ASGIApp, export: SpanExport) -> None:
        self._app = app
        self._export = export

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = _parent(scope)
        if scope["type"] != "http" or not (parent is None or parent.sampled):
            await self._app(scope, receive, send)
            return
        trace = scope[TRACE] = RequestTrace(parent)
        scope[DIRECT_SEND] = send
        header = (b"traceparent", trace.context.header.encode())

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, start)
        finally:
            self._export.add(trace.end(scope["method"], scope.get(ROUTE, ""), scope["path"]))


def _parent(scope: Scope) -> TraceContext | None:
    for name, value in scope.get("headers", ()):
        if name == b"traceparent":
            return TraceContext.parse(value.decode("latin-1"))
    return None


class RequestTrace:
    """All spans of one exchange."""

    def __init__(self, parent: TraceContext | None) -> None:
        self.context = TraceContext.root() if parent is None else parent.child()
        self.clock = WallClock()
        self.status = 0
        self.spans: list[Span] = []
        self._parent_id = None if parent is None else parent.span_id
        self._started = time.monotonic()

    @contextmanager
    def handler(self, route: str) -> Iterator[HandlerTrace]:
        handler = HandlerTrace(self, span_name(route))
        try:
            yield handler
        except RequestError as error:
            handler.failed(error)
            raise
        except ClientGone:
            handler.error = "dropped"
            raise
        except Exception:
            handler.error = "internal"
            raise
        finally:
            self.spans += handler.end()

    def end(self, method: str, route: str, path: str) -> list[Span]:
        """`path` is in no attribute unless it is one of ours: it may be anything."""
        shown = path if route else ""
        attributes: dict[str, Attribute] = {"http.request.method": method, "http.response.status_code": self.status}
        if shown:
            attributes["http.route"] = shown
        error = str(self.status) if self.status >= 500 else None
        times = self.clock.ns(self._started), self.clock.ns(time.monotonic())
        name = f"{method} {shown}".rstrip()
        self.spans.append(Span(name, self.context, self._parent_id, *times, SpanKind.SERVER, attributes, error=error))
        return self.spans


class HandlerTrace:
    """One request for generation; an exchange may be several."""

    def __init__(self, trace: RequestTrace, name: str) -> None:
        self.error: str | None = None
        self._context = trace.context.child()
        self._parent_id = trace.context.span_id
        self._clock = trace.clock
        self._name = name
        self._started = time.monotonic()
        self._validated: float | None = None
        self._streams: list[TracedStream] = []
        self._attributes: dict[str, Attribute] = {}

    def validated(self) -> None:
        self._validated = time.monotonic()

    def stream(
        self, scheduler: SchedulerClient, request: GenerationRequest, transcript: Transcript, seed: int | None
    ) -> Stream:
        stream = TracedStream(scheduler, request, transcript, seed, self._context)
        self._streams.append(stream)
        return stream

    def succeeded(
        self, request: ValidRequest, num_sequences: int, timings: Timings, seed: int | None, model: str
    ) -> None:
        self._attributes |= success_fields(request, num_sequences, timings, seed)
        self._attributes |= _gen_ai(request, model, self._name)
        streams = [stream for stream in self._streams if stream.transcript.finish_reason is not None]
        reasons = [str(stream.transcript.finish_reason) for stream in streams]
        self._attributes |= {
            "gen_ai.usage.input_tokens": len(request.input_ids),
            "gen_ai.usage.output_tokens": sum(stream.transcript.num_tokens for stream in streams),
            "gen_ai.usage.cache_read.input_tokens": self._streams[0].num_cached,
            "gen_ai.response.finish_reasons": reasons,
            "legato.time_to_first_token": round(timings.to_first_token, 4),
        }

    def failed(self, error: RequestError) -> None:
        self.error = error.counted_as

    def end(self) -> list[Span]:
        now = time.monotonic()
        start_ns, now_ns = self._clock.ns(self._started), self._clock.ns(now)
        spans = [
            Span(self._name, self._context, self._parent_id, start_ns, now_ns,
                 attributes=self._attributes, error=self.error)
        ]  # fmt: skip
        validated = now if self._validated is None else self._validated
        parent_id = self._context.span_id
        spans.append(Span("validate", self._context.child(), parent_id, start_ns, self._clock.ns(validated)))
        for stream in self._streams:
            spans += stream.spans(self._clock, now, self.error)
        return spans


def _gen_ai(request: ValidRequest, model: str, name: str) -> dict[str, Attribute]:
    """OpenTelemetry's semantic conventions for generative AI."""
    chooser = request.parameters
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if name in CHATS else "text_completion",
        "gen_ai.provider.name": "legato",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_new_tokens,
    }
    if chooser.frequency_penalty or chooser.presence_penalty:
        attributes["gen_ai.request.frequency_penalty"] = chooser.frequency_penalty
        attributes["gen_ai.request.presence_penalty"] = chooser.presence_penalty
    if chooser.do_sample:
        attributes |= {
            "gen_ai.request.temperature": chooser.temperature,
            "gen_ai.request.top_p": chooser.top_p,
            "gen_ai.request.top_k": chooser.top_k,
            # Seeds have 64 bits without a sign, attributes with one.
            "gen_ai.request.seed": str(chooser.seed),
        }
    return attributes
