"""The spans of a request, as the HTTP worker makes them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from legato.http.app import create_app
from legato.scheduling.state import Output, PromptChunk
from legato.telemetry.export import SpanExport
from legato.telemetry.tracing import Span, TraceContext
from tests.http.asgi import SETTINGS, Answer, Call, FakeBackend, get, post, tokenizer, until

PARENT = TraceContext(0xABC, 0xDEF)
GENERATE = {"inputs": "hi", "parameters": {"max_new_tokens": 20}}


class Kept(SpanExport):
    """Keeps spans instead of sending them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def traced(path: str, body: Any, backend: FakeBackend | None = None, **headers: str) -> tuple[Answer, Kept]:
    kept = Kept()

    async def main() -> Answer:
        return await post(create_app(backend or FakeBackend(), tokenizer(), SETTINGS, spans=kept), path, body, headers)

    return asyncio.run(main()), kept


def test_the_callers_trace_goes_on_and_is_answered() -> None:
    answer, kept = traced("/generate", GENERATE, traceparent=PARENT.header)
    (server,) = kept.named("POST /generate")
    assert answer.headers["traceparent"] == server.context.header
    assert server.parent_id == PARENT.span_id and server.attributes["http.response.status_code"] == 200
    assert {span.context.trace_id for span in kept.spans} == {PARENT.trace_id}
    assert {"generate", "validate", "queued", "infer", "decode"} <= {span.name for span in kept.spans}


def test_a_caller_who_does_not_sample_gets_no_spans_and_the_scheduler_hears_nothing() -> None:
    backend = FakeBackend()
    answer, kept = traced("/generate", GENERATE, backend, traceparent=PARENT._replace(sampled=False).header)
    assert answer.status == 200 and not kept.spans and "traceparent" not in answer.headers
    assert backend.requests[0].traceparent == "" and not backend.chunks


def test_prompt_chunks_have_the_spans_that_the_shard_was_told() -> None:
    backend = FakeBackend(pause_after=0)
    kept = Kept()

    async def main() -> None:
        app = create_app(backend, tokenizer(), SETTINGS, spans=kept)
        call = Call(app, "POST", "/generate", body=[b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        backend.chunks[backend.requests[0].id].append(PromptChunk(77, 3, 10, 20, 5, 2, 16, 4))
        backend.go_on.set()
        await call.answer()

    asyncio.run(main())
    (infer,), (prefill,) = kept.named("infer"), kept.named("prefill")
    assert backend.requests[0].traceparent == infer.context.header
    assert (prefill.context.span_id, prefill.parent_id) == (77, infer.context.span_id)
    assert (prefill.start_ns, prefill.end_ns) == (10, 20)
    assert prefill.attributes["legato.num_cached_tokens"] == 16 and prefill.attributes["rpc.method"] == "Tokens"
    assert not backend.chunks, "nothing is left"


def test_a_clock_that_is_set_moves_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards' spans have the new time at once."""
    kept, hour_ns, time_ns = Kept(), 3600 * 10**9, time.time_ns

    async def main() -> None:
        app = create_app(FakeBackend(), tokenizer(), SETTINGS, spans=kept)
        await post(app, "/generate", GENERATE)
        monkeypatch.setattr(time, "time_ns", lambda: time_ns() + hour_ns)
        await post(app, "/generate", GENERATE)

    asyncio.run(main())
    before, after = kept.named("generate")
    assert hour_ns <= after.start_ns - before.start_ns < hour_ns + 60 * 10**9


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions"])
def test_a_failed_request_says_so_in_its_spans(path: str) -> None:
    backend = FakeBackend(lambda request: [Output(error="boom")])
    _, kept = traced(path, {"inputs": "hi", "prompt": "hi"}, backend)
    handler = next(span for span in kept.spans if span.name in path.rpartition("/")[2])
    assert handler.error == "generation"
    (queued,) = kept.named("queued")
    assert queued.error == "generation" and not kept.named("infer")


def test_a_client_that_hangs_up_leaves_spans() -> None:
    backend, kept = FakeBackend(pause_after=1), Kept()

    async def main() -> None:
        app = create_app(backend, tokenizer(), SETTINGS, spans=kept)
        call = Call(app, "POST", "/generate_stream", body=[b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        call.hang_up()
        await asyncio.wait_for(call.task, 5)

    asyncio.run(main())
    (handler,) = kept.named("generate_stream")
    assert handler.error == "dropped" and not backend.chunks


def test_each_sequence_has_its_own_spans() -> None:
    parameters = {"best_of": 2, "do_sample": True, "max_new_tokens": 20}
    backend = FakeBackend()
    _, kept = traced("/generate", {"inputs": "hi", "parameters": parameters}, backend)
    assert len(kept.named("infer")) == len(kept.named("queued")) == 2
    assert len({request.traceparent for request in backend.requests}) == 2


def test_paths_that_are_not_ours_are_not_repeated() -> None:
    kept = Kept()

    async def main() -> None:
        await get(create_app(FakeBackend(), tokenizer(), SETTINGS, spans=kept), "/canary")

    asyncio.run(main())
    (span,) = kept.spans
    assert span.name == "GET" and "canary" not in str(span)
    assert span.attributes["http.response.status_code"] == 404


def test_without_tracing_opentelemetry_is_never_imported() -> None:
    program = "import sys, legato.http.worker, legato.router.cli, legato.server.fake.service as s; " + (
        "sys.exit([name for name in sys.modules if name.startswith('opentelemetry')] or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
