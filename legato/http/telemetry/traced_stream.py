"""A sequence that is traced: spans are made of what is known when it has ended. Nothing is done for each token."""

from __future__ import annotations

import msgspec

from legato.http.scheduler import SchedulerClient
from legato.http.streams import Stream, Transcript
from legato.scheduling.state import GenerationRequest, PromptChunk
from legato.telemetry.tracing import RPC, Attribute, Span, SpanEvent, SpanKind, TraceContext, WallClock


class TracedStream(Stream):
    def __init__(
        self,
        scheduler: SchedulerClient,
        request: GenerationRequest,
        transcript: Transcript,
        seed: int | None,
        parent: TraceContext,
    ) -> None:
        self._parent = parent
        self._infer = parent.child()
        request = msgspec.structs.replace(request, traceparent=self._infer.header)
        super().__init__(scheduler, request, transcript, seed)
        self._chunks: list[PromptChunk] = []

    def start(self) -> None:
        self._scheduler.chunks[self._request.id] = self._chunks
        super().start()

    def spans(self, clock: WallClock, now: float, error: str | None) -> list[Span]:
        """`now` in monotonic seconds; `error` ended the request, if one did."""
        self._scheduler.chunks.pop(self._request.id, None)
        if not self.queued_at:  # never submitted
            return []
        num_tokens, first = self.transcript.num_tokens, self.first_token_at
        was_admitted = bool(num_tokens or self._chunks)
        queued_ns = clock.ns(self.queued_at)
        admitted_ns = clock.ns(self.queued_at + self.queue_time if num_tokens else now)
        if self._chunks:
            admitted_ns = min(admitted_ns, self._chunks[0].start_ns)
        queued = Span("queued", self._parent.child(), self._parent.span_id, queued_ns, max(queued_ns, admitted_ns))
        if not was_admitted:
            queued.error = error
            return [queued]
        decode = None if num_tokens < 2 or first is None else self._decode(clock, first, now)
        attributes: dict[str, Attribute] = {"legato.num_tokens": num_tokens}
        end_ns = clock.ns(now) if decode is None or error is not None else decode.end_ns
        infer = Span("infer", self._infer, self._parent.span_id, admitted_ns, end_ns, attributes=attributes)
        infer.error = error
        spans = [queued, infer, *(self._prefill(chunk) for chunk in self._chunks)]
        return spans if decode is None else [*spans, decode]

    def _prefill(self, chunk: PromptChunk) -> Span:
        attributes: dict[str, Attribute] = {
            **RPC,
            "rpc.method": "Tokens",
            "legato.step": chunk.step_id,
            "legato.num_tokens": chunk.num_tokens,
            "legato.num_cached_tokens": chunk.num_cached,
            "legato.batch_size": chunk.batch_size,
            "legato.forward_time": round(chunk.forward_ns / 1e9, 5),
        }
        context = TraceContext(self._infer.trace_id, chunk.span_id)
        return Span("prefill", context, self._infer.span_id, chunk.start_ns, chunk.end_ns, SpanKind.CLIENT, attributes)

    def _decode(self, clock: WallClock, first: float, now: float) -> Span:
        steps = self._scheduler.step_times
        groups = [] if steps is None else steps.after(first, self.transcript.num_tokens - 1)
        events = [
            SpanEvent(
                "step",
                clock.ns(group.at),
                {"legato.num_steps": group.num, "legato.longest_gap": round(group.longest_gap, 4)},
            )
            for group in groups
        ]
        end_ns = events[-1].time_ns if events else clock.ns(now)
        return Span("decode", self._infer.child(), self._infer.span_id, clock.ns(first), end_ns, events=events)
