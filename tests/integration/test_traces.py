"""Traces of real processes at a real collector: one tree for each request, from the HTTP exchange into the shard."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.integration.client import at_once
from tests.integration.processes import Launched, launched, until

pytest.importorskip("opentelemetry.sdk", reason="the packages of legato[otel] are not installed")

from legato.common.sockets import free_port
from tests.telemetry.collector import Collector, Received, collecting

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Launched, Collector]]:
    collector = Collector()
    words = ("--fake", "--fake-step-ms=1", "--max-batch-prefill-tokens=32", "--otlp-service-name=test")
    with collecting(collector) as endpoint:
        folder = tmp_path_factory.mktemp("traced")
        with launched(folder, model, *words, f"--otlp-endpoint={endpoint}") as server:
            yield server, collector


def ask(server: Launched, path: str, body: object, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    answered = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return answered


def trace_of(collector: Collector, trace_id: str, *names: str) -> list[Received]:
    """The spans of one trace, once these are among them."""

    def spans() -> list[Received]:
        return [span for span in collector.spans if span.trace_id == trace_id]

    until(lambda: set(names) <= {span.name for span in spans()}, f"spans {names} of {trace_id}")
    return spans()


def parents(spans: list[Received]) -> dict[str, set[str]]:
    """Names of spans -> names of their parents."""
    names = {span.span_id: span.name for span in spans}
    found: dict[str, set[str]] = {}
    for span in spans:
        found.setdefault(span.name, set()).add(names.get(span.parent_id, span.parent_id))
    return found


def test_a_request_is_one_connected_trace_from_http_into_the_shard(traced: tuple[Launched, Collector]) -> None:
    server, collector = traced
    body = {"inputs": "word " * 60, "parameters": {"max_new_tokens": 40, "seed": 7, "temperature": 0.5}}
    status, headers, _ = ask(server, "/generate", body, traceparent=f"00-{TRACE}-{CALLER}-01")
    assert status == 200
    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01") and span_id != CALLER
    spans = trace_of(collector, TRACE, "POST /generate", "Tokens", "generate_token")
    assert parents(spans) == {
        "POST /generate": {CALLER},
        "generate": {"POST /generate"},
        "validate": {"generate"},
        "queued": {"generate"},
        "infer": {"generate"},
        "prefill": {"infer"},
        "decode": {"infer"},
        "Tokens": {"prefill"},
        "generate_token": {"Tokens"},
    }
    by_name = {span.name: span for span in spans}
    assert by_name["POST /generate"].span_id == span_id
    chunks = [span for span in spans if span.name == "prefill"]
    assert len(chunks) > 1, "a prompt longer than a step has several chunks"
    assert len([span for span in spans if span.name == "Tokens"]) == len(chunks)
    tokens = sum(chunk.attributes["legato.num_tokens"] for chunk in chunks)
    assert tokens == by_name["generate"].attributes["gen_ai.usage.input_tokens"]
    assert all(span.start_ns <= span.end_ns for span in spans)
    assert {span.resource["legato.process"] for span in spans} == {"http_worker", "shard-0"}
    assert {span.resource["service.name"] for span in spans} == {"test"}


def test_the_handler_has_tgis_attributes_and_those_of_generative_ai(traced: tuple[Launched, Collector]) -> None:
    server, collector = traced
    body = {"inputs": "hello there", "parameters": {"max_new_tokens": 40, "seed": 7, "temperature": 0.5}}
    _, headers, _ = ask(server, "/generate_stream", body)
    spans = trace_of(collector, headers["traceparent"].split("-")[1], "generate_stream", "decode")
    (handler,) = [span for span in spans if span.name == "generate_stream"]
    found = handler.attributes
    times = {"total_time", "validation_time", "queue_time", "inference_time", "time_per_token"}
    assert {*times, "parameters", "seed"} <= found.keys() and found["seed"] == "Some(7)"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.usage.output_tokens"]) == (40, 40)
    assert found["gen_ai.request.temperature"] == 0.5 and found["gen_ai.operation.name"] == "text_completion"
    assert "hello" not in str(spans)
    (decode,) = [span for span in spans if span.name == "decode"]
    assert 1 < len(decode.events) <= 4
    assert sum(attributes["legato.num_steps"] for _, attributes in decode.events) == 39, "all but the first token"


def test_many_requests_at_once_are_many_traces(traced: tuple[Launched, Collector]) -> None:
    server, collector = traced
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 5}}
    answers = at_once([partial(ask, server, "/generate", body)] * 20)
    ids = {headers["traceparent"].split("-")[1] for _, headers, _ in answers}
    assert len(ids) == 20
    for trace_id in ids:
        spans = trace_of(collector, trace_id, "POST /generate", "decode", "generate_token")
        known = {span.span_id for span in spans}
        assert [span.name for span in spans if span.parent_id not in known] == ["POST /generate"]


def test_a_refused_request_has_spans_that_say_so_and_an_unsampled_one_has_none(
    traced: tuple[Launched, Collector],
) -> None:
    server, collector = traced
    other = "1" * 32
    status, headers, _ = ask(server, "/generate", {"inputs": "hi"}, traceparent=f"00-{other}-{CALLER}-00")
    assert status == 200 and "traceparent" not in headers
    status, headers, _ = ask(server, "/generate", {"inputs": ""})
    spans = trace_of(collector, headers["traceparent"].split("-")[1], "generate", "POST /generate")
    by_name = {span.name: span for span in spans}
    assert by_name["generate"].failed and by_name["generate"].attributes["error.type"] == "validation"
    assert by_name["POST /generate"].attributes["http.response.status_code"] == status == 422
    assert other not in {span.trace_id for span in collector.spans}


def test_spans_are_counted(traced: tuple[Launched, Collector]) -> None:
    server, _ = traced
    server.client.generate("hi", max_new_tokens=2)
    until(lambda: server.client.metric("legato_trace_spans_exported") > 0, "exported spans are counted")
    assert server.client.metric("legato_trace_spans_dropped") == 0


def test_a_collector_that_is_down_costs_no_request_anything(tmp_path: Path, model: Path) -> None:
    """And one that comes up later gets the spans of later requests."""
    port = free_port()
    with launched(tmp_path, model, "--fake", f"--otlp-endpoint=http://127.0.0.1:{port}") as server:
        for _ in range(5):
            server.client.generate("hi", max_new_tokens=20)
        until(lambda: server.client.metric("legato_trace_spans_dropped") > 0, "lost spans are counted", 60)
        assert server.log.count("does not accept spans") <= 2, "once for each process"
        assert server.client.metric("tgi_request_success") == 5
        collector = Collector()
        with collecting(collector, port):
            until(lambda: bool(server.client.generate("hi", max_new_tokens=2)) and bool(collector.spans), "spans", 60)


@pytest.mark.parametrize(("delay", "code"), [(3.0, None), (0.0, "INTERNAL"), (0.0, "UNAVAILABLE")])
def test_a_collector_that_is_slow_or_fails_costs_no_request_anything(
    traced: tuple[Launched, Collector], delay: float, code: str | None
) -> None:
    server, collector = traced
    before, calls = server.client.metric("tgi_request_success"), collector.num_calls
    collector.delay, collector.code = delay, code and grpc.StatusCode[code]
    try:
        body = {"inputs": "hi", "parameters": {"max_new_tokens": 5}}
        while collector.num_calls == calls:
            assert ask(server, "/generate", body)[0] == 200
        assert {status for status, _, _ in at_once([partial(ask, server, "/generate", body)] * 16)} == {200}
        assert server.client.metric("tgi_request_success") >= before + 16
        lost = partial(server.client.metric, "legato_trace_spans_dropped")
        if code is not None:
            until(lambda: lost() > 0, "lost spans are counted")
    finally:
        collector.delay, collector.code = 0.0, None
