"""POST /v1/messages: what becomes of blocks, headers and errors on the way to the template and back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from legato.pb import generate_pb2 as pb
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.generation import parameters_of
from tests.http.asgi import FakeBackend, outputs_of, post
from tests.http.routes.agents.test_event_order import ROOMY
from tests.http.routes.openai.fakes import FakeTemplate, Server

PATH = "/v1/messages"
THINKS = "<think></think><tool_call>"


def server_for(text: str = "hello", template: str = THINKS, **settings: Any) -> Server:
    return Server(FakeBackend(lambda request: outputs_of(text), limits=ROOMY), FakeTemplate(text=template), settings)


def ask(server: Server, messages: Any = "hi", **fields: Any) -> Any:
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return server.ask(PATH, {"model": "m", "max_tokens": 100, "messages": given, **fields})


def rendered(server: Server) -> list[Any]:
    assert server.template is not None
    messages: list[Any] = server.template.asked[-1]["messages"]
    return messages


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2; cch=1a;\nBe brief.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=2b;"}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "x-anthropic-billing-header: cch=3c;\n\nBe brief."}],
    ],
)
def test_the_billing_line_never_reaches_the_prompt(system: Any) -> None:
    server = server_for()
    ask(server, system=system)
    assert rendered(server)[0] == {"role": "system", "content": "Be brief."}


def test_cached_tokens_are_those_of_the_scheduler() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        outputs = outputs_of("hello")
        outputs[0].num_cached = 5
        return outputs

    server = Server(FakeBackend(script, limits=ROOMY), FakeTemplate())
    usage = ask(server).json()["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (5, 0)
    assert usage["input_tokens"] + 5 == len(server.backend.requests[0].input_ids)


def test_blocks_become_messages_that_templates_know() -> None:
    server = server_for()
    ask(
        server,
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Look:"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "nothing", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    first, answer, result, last = rendered(server)
    assert first == {"role": "user", "content": "a\n\nb"}
    assert (answer["content"], answer["reasoning_content"]) == ("Look:", "hm")
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "Error: nothing"}
    assert last == {"role": "user", "content": "And?"}


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled"}, True)],
)
def test_a_model_reasons_only_if_it_is_asked_to(thinking: Any, enabled: bool) -> None:
    server = server_for()
    ask(server, thinking=thinking)
    assert server.template is not None
    assert server.template.asked[-1]["kwargs"] == {"enable_thinking": enabled, "thinking": enabled}


def test_a_budget_reaches_the_shards() -> None:
    server = server_for()
    ask(server, thinking={"type": "enabled", "budget_tokens": 7})
    reasoning = parameters_of(server.backend.requests[0]).reasoning
    assert (reasoning.budget, list(reasoning.ends)) == (7, ["</think>"])
    assert reasoning.start_ids and reasoning.forced_ids
    ask(server)
    assert not parameters_of(server.backend.requests[-1]).HasField("reasoning")


def test_an_operator_may_limit_all_reasoning() -> None:
    server = server_for(reasoning_budget=3)
    ask(server)
    assert parameters_of(server.backend.requests[0]).reasoning.budget == 3


def test_a_schema_is_followed_after_the_reasoning() -> None:
    server = server_for('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(server, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=100)
    parameters = parameters_of(server.backend.requests[0])
    assert parameters.grammar_type == pb.GRAMMAR_TYPE_JSON
    assert parameters.reasoning.budget == 50  # leaves room for what has to follow


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "invalid_request_error", "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "invalid_request_error", "content[0].type"),
        ({"tool_choice": {"type": "tool"}, "tools": []}, 400, "invalid_request_error", "tool_choice.name"),
        ({"stop_sequences": ["a"] * 9}, 400, "invalid_request_error", "stop_sequences"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            400,
            "invalid_request_error",
            "'t'",
        ),
    ],
)
def test_errors_are_anthropics(fields: Any, status: int, kind: str, words: str) -> None:
    body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = server_for().ask(PATH, body)
    error = answer.json()
    assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert words in error["error"]["message"]


def test_threads_are_refused_so_that_clients_send_everything() -> None:
    """In the words that make Anthropic's client go on without."""
    refused = server_for().ask(
        PATH,
        {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], "thread": {"type": "create"}},
    )
    assert (refused.status, refused.json()["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})
    assert "details" not in server_for().ask(PATH, {"model": "m"}).json()["error"]


def test_a_server_that_is_overloaded_says_so_and_when_to_come_back() -> None:
    refused = [Output(error="Model is overloaded", retry_after=2)]
    answer = ask(Server(FakeBackend(lambda request: refused, limits=ROOMY), FakeTemplate()))
    assert (answer.status, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert answer.headers["retry-after"]


def test_the_key_may_come_as_either_header() -> None:
    server = server_for(api_keys=("secret",))
    body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert asyncio.run(post(server.app, PATH, body, headers)).status == 200
    refused = asyncio.run(post(server.app, PATH, body))
    assert (refused.status, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_an_answer_that_is_cut_off_has_no_tool_use_as_its_reason() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"at": '
    backend = FakeBackend(lambda request: outputs_of(text, FinishReason.LENGTH), limits=ROOMY)
    server = Server(backend, FakeTemplate(text=THINKS))
    answer = ask(server, tools=[{"name": "look", "input_schema": {"type": "object"}}]).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {}
