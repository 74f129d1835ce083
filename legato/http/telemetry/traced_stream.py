"""A sequence that is traced: it notes when its tokens come, and makes spans of that when it has ended."""

from __future__ import annotations

import time

import msgspec

from legato.http.scheduler import SchedulerClient
from legato.http.streams import Stream, Transcript
from legato.scheduling.state import GenerationRequest, Output, PromptChunk
from legato.telemetry.tracing import RPC, Attribute, Span, SpanEvent, SpanKind, TraceContext, WallClock

# Events of a decode span. Beyond that, each stands for several steps.
MAX_STEP_EVENTS = 16


class TracedStream(Stream):
    """Notes when tokens come, up to a fixed number of notes."""

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
        self._steps = StepNotes()

    def start(self) -> None:
        self._scheduler.chunks[self._request.id] = self._chunks
        super().start()

    def receive(self, output: Output) -> None:
        if output.error is None:
            self._steps.add(time.monotonic())
        super().receive(output)

    def spans(self, clock: WallClock, now: float, error: str | None) -> list[Span]:
        self._scheduler.chunks.pop(self._request.id, None)
        if not self.queued_at:  # never submitted
            return []
        queued_ns = clock.ns(self.queued_at)
        admitted_ns = clock.ns(self.queued_at + self.queue_time if self._steps.num else now)
        queued = Span("queued", self._parent.child(), self._parent.span_id, queued_ns, admitted_ns)
        if self._chunks:
            admitted_ns = min(admitted_ns, self._chunks[0].start_ns)
        elif not self._steps.num:
            queued.error = error
            return [queued]
        end_ns = clock.ns(self._steps.last if self._steps.num else now)
        attributes: dict[str, Attribute] = {"legato.request_id": self._request.id, "legato.num_tokens": self._steps.num}
        infer = Span(
            "infer", self._infer, self._parent.span_id, admitted_ns, end_ns, attributes=attributes, error=error
        )
        spans = [queued, infer, *(self._prefill(chunk) for chunk in self._chunks)]
        if self._steps.num > 1:
            first_ns = clock.ns(self._steps.first)
            events = [SpanEvent("step", clock.ns(at), _step_attributes(num, gap)) for at, num, gap in self._steps.notes]
            spans.append(Span("decode", self._infer.child(), self._infer.span_id, first_ns, end_ns, events=events))
        return spans

    def _prefill(self, chunk: PromptChunk) -> Span:
        attributes: dict[str, Attribute] = {
            **RPC,
            "rpc.method": "Tokens",
            "legato.step": chunk.step_id,
            "legato.num_tokens": chunk.num_tokens,
            "legato.num_cached_tokens": chunk.num_cached,
            "legato.batch_size": chunk.batch_size,
            "legato.forward_time": chunk.forward_ns / 1e9,
        }
        context = TraceContext(self._infer.trace_id, chunk.span_id)
        return Span("prefill", context, self._infer.span_id, chunk.start_ns, chunk.end_ns, SpanKind.CLIENT, attributes)


def _step_attributes(num_steps: int, longest_gap: float) -> dict[str, Attribute]:
    return {"legato.num_steps": num_steps, "legato.longest_gap": longest_gap}


class StepNotes:
    """When steps brought a token: (time of the last, number of steps, longest gap before one of them).

    When there are too many notes, neighbours become one, so their number is bounded and no slow step is lost.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[float, int, float]] = []
        self.num = 0
        self.first = self.last = 0.0
        self._per_note = 1

    def add(self, now: float) -> None:
        if self.num == 0:
            self.first = self.last = now
            self.num = 1
            return
        gap, self.last = now - self.last, now
        notes = self.notes
        self.num += 1
        if notes and notes[-1][1] < self._per_note:
            _, num, longest = notes[-1]
            notes[-1] = now, num + 1, max(longest, gap)
            return
        if len(notes) == MAX_STEP_EVENTS:
            pairs = zip(notes[::2], notes[1::2], strict=True)
            notes[:] = [(after[0], before[1] + after[1], max(before[2], after[2])) for before, after in pairs]
            self._per_note *= 2
        notes.append((now, 1, gap))
