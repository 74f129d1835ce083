"""When the prompt chunks of traced requests were computed. The HTTP workers make spans of it, the shards their own.

There is one of these only with `--otlp-endpoint`. It looks at rows whose prompt is being computed, never at decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from legato.scheduling.state import PromptChunk, StepPlan, StepResult
from legato.telemetry.tracing import TraceContext


@dataclass(slots=True)
class _TracedPrompt:
    request_id: int
    context: TraceContext
    # Known tokens that no step has computed yet, and those that were in the cache; said once.
    num_left: int
    num_cached: int


@dataclass(slots=True)
class _SentChunk:
    request_id: int
    span: TraceContext
    num_tokens: int
    num_cached: int


@dataclass(slots=True)
class _SentStep:
    sent_ns: int
    batch_size: int
    chunks: list[_SentChunk]


class StepTraces:
    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._prompts: dict[int, _TracedPrompt] = {}  # by row
        self._steps: dict[int, _SentStep] = {}  # by number, those with a chunk of a traced prompt

    def planned(self, plan: StepPlan) -> None:
        """Adds to the plan what the shards need for spans of their own."""
        for admission in plan.admitted:
            self._prompts.pop(admission.row, None)  # one that was cancelled or preempted there
            context = TraceContext.parse(admission.request.traceparent)
            if context is not None:
                num_left = len(admission.input_ids) - admission.num_cached
                self._prompts[admission.row] = _TracedPrompt(
                    admission.request.id, context, num_left, admission.num_cached
                )
        if not self._prompts:
            return
        chunks = []
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            prompt = self._prompts.get(row)
            if prompt is not None:
                span = prompt.context.child()
                chunks.append(_SentChunk(prompt.request_id, span, num_tokens, prompt.num_cached))
                plan.traces.append((row, span.header))
                prompt.num_left -= num_tokens
                prompt.num_cached = 0
                if prompt.num_left <= 0:
                    del self._prompts[row]
        if chunks:
            self._steps[plan.id] = _SentStep(self._now_ns(), len(plan.rows), chunks)

    def clear(self) -> None:
        """The steps on their way are lost; their requests will be admitted again."""
        self._prompts.clear()
        self._steps.clear()

    def completed(self, result: StepResult) -> list[tuple[int, PromptChunk]]:
        """The chunks of a step, each with the request that it belongs to."""
        step = self._steps.pop(result.id, None)
        if step is None:
            return []
        now = self._now_ns()
        return [
            (
                chunk.request_id,
                PromptChunk(
                    span_id=chunk.span.span_id,
                    step_id=result.id,
                    start_ns=step.sent_ns,
                    end_ns=now,
                    forward_ns=result.forward_ns,
                    num_tokens=chunk.num_tokens,
                    num_cached=chunk.num_cached,
                    batch_size=step.batch_size,
                ),
            )
            for chunk in step.chunks
        ]
