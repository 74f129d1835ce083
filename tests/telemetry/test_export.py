"""The queue between requests and the collector: bounded, never waited for, and what is lost is counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from legato.telemetry.export import MAX_BATCH, SpanExport
from legato.telemetry.tracing import Span, TraceContext


def spans(num: int) -> list[Span]:
    return [Span("x", TraceContext.root(), None, 1, 2) for _ in range(num)]


def test_spans_arrive_in_order_and_are_counted() -> None:
    received: list[Span] = []

    def send(batch: Sequence[Span]) -> bool:
        assert len(batch) <= MAX_BATCH
        received.extend(batch)
        return True

    export, sent = SpanExport(send), spans(3 * MAX_BATCH)
    for first in range(0, len(sent), 10):
        export.add(sent[first : first + 10])
    export.close(10)
    assert received == sent
    assert export.take_counts() == (len(sent), 0)
    assert export.take_counts() == (0, 0)


def test_a_collector_that_hangs_fills_a_bounded_queue_and_no_trace_has_holes() -> None:
    stuck, reached = threading.Event(), threading.Event()
    received: list[Span] = []

    def send(batch: Sequence[Span]) -> bool:
        reached.set()
        stuck.wait(30)
        received.extend(batch)
        return True

    export = SpanExport(send, max_queued=100)
    export.add(spans(MAX_BATCH // 10))
    assert reached.wait(30)
    for _ in range(30):
        export.add(spans(7))
    stuck.set()
    export.close(30)
    exported, dropped = export.take_counts()
    assert exported == len(received) == MAX_BATCH // 10 + 14 * 7
    assert dropped == 16 * 7


def test_a_collector_that_refuses_or_breaks_loses_spans_and_nothing_else() -> None:
    answers = iter([False, RuntimeError("broken"), True])
    done = threading.Semaphore(0)

    def send(batch: Sequence[Span]) -> bool:
        answer = next(answers)
        done.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    export = SpanExport(send)
    for _ in range(3):
        export.add(spans(2))
        assert done.acquire(timeout=30)
    export.close(30)
    assert export.take_counts() == (2, 4)


def test_the_end_waits_no_longer_than_it_is_told() -> None:
    forever = threading.Event()
    export = SpanExport(lambda batch: forever.wait(60))
    export.add(spans(1))
    export.close(0.05)
    forever.set()
