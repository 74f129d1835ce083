"""Tools on POST /v1/chat/completions, from the request to the answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from legato.api.openai.responses import ChatCompletionChunk
from legato.grammar.kinds import GrammarKind
from legato.grammar.wire import from_pb
from legato.http.app import create_app
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.generation import parameters_of
from tests.http import asgi
from tests.http.asgi import EOS, LIMITS, SETTINGS, Answer, FakeBackend, outputs_of
from tests.http.routes.openai.fakes import CHAT, HI, FakeTemplate, Server, chunks, problem

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
OTHER = {"type": "function", "function": {"name": "other"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROOMY = replace(LIMITS, max_input_tokens=4000, max_total_tokens=8000)


def says(text: str, finish: FinishReason = FinishReason.EOS_TOKEN) -> FakeBackend:
    return FakeBackend(lambda request: outputs_of(text, finish), limits=ROOMY)


def ask(backend: FakeBackend, template: FakeTemplate | None = None, **request: Any) -> Answer:
    server = Server(backend, template=template or FakeTemplate(text="<tool_call>"))
    return server.ask(CHAT, {"messages": HI, "tools": TOOLS, **request})


def choice_of(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    (choice,) = answer.json()["choices"]
    return dict(choice)


def streamed(answer: Answer) -> tuple[str, list[dict[str, str]], str]:
    """Content, calls and finish reason, put together as OpenAI's client does it."""
    content, reason = "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks(answer):
        msgspec.convert(chunk, ChatCompletionChunk, strict=True)
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content", "")
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, calls, reason


def test_a_call_in_an_answer() -> None:
    choice = choice_of(ask(says(CALL)))
    call_id = choice["message"]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_with_text_and_two_calls() -> None:
    text = f"I look.\n{CALL}\n" + CALL.replace("Oslo", "Rome")
    content, calls, reason = streamed(ask(says(text), stream=True))
    assert (content, reason) == ("I look.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])["city"]) for call in calls] == [
        ("weather", "Oslo"),
        ("weather", "Rome"),
    ]
    assert calls[0]["id"] != calls[1]["id"]


def test_an_answer_without_calls_is_as_ever() -> None:
    choice = choice_of(ask(says("hello world")))
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert streamed(ask(says("hello world"), stream=True)) == ("hello world", [], "stop")


def test_auto_is_one_generation_that_is_free() -> None:
    backend = says("hello world")
    ask(backend, tool_choice="auto")
    (request,) = backend.requests
    assert from_pb(parameters_of(request)) is None


def test_a_call_that_is_cut_off_has_finish_reason_length() -> None:
    backend = says('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', FinishReason.LENGTH)
    choice = choice_of(ask(backend))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


def test_logprobs_of_a_stream_with_calls_are_all_there() -> None:
    events = chunks(ask(says(CALL), stream=True, logprobs=True))
    scored = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in scored) == CALL


def test_every_choice_has_calls_of_its_own() -> None:
    choices = ask(says(CALL), n=2).json()["choices"]
    first, second = (choice["message"]["tool_calls"][0]["id"] for choice in choices)
    assert first != second


def test_only_one_call_without_parallel_tool_calls() -> None:
    choice = choice_of(ask(says(f"{CALL}\n{CALL}"), parallel_tool_calls=False))
    assert len(choice["message"]["tool_calls"]) == 1


def test_a_marker_that_is_a_special_token_is_seen() -> None:
    tokenizer = Tokenizer.from_str(asgi.tokenizer().to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    marker = tokenizer.token_to_id("[TOOL_CALLS]")
    assert marker is not None

    def script(request: GenerationRequest) -> list[Output]:
        return [Output(marker), *outputs_of(' [{"name": "weather", "arguments": {"city": "Oslo"}}]')]

    for stop in (None, ["Helsinki", " [x"]):
        app = create_app(
            FakeBackend(script, limits=ROOMY), tokenizer, SETTINGS, chat_template=FakeTemplate(text="[TOOL_CALLS]")
        )
        answer = asyncio.run(asgi.post(app, CHAT, {"messages": HI, "tools": TOOLS, "stop": stop}))
        choice = choice_of(answer)
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_the_end_token_stays_silent() -> None:
    assert EOS == 1
    assert choice_of(ask(says("bye")))["message"]["content"] == "bye"


# ---- what is asked of the model --------------------------------------------------------------------------------------


def test_tools_reach_the_template() -> None:
    template = FakeTemplate(text="<tool_call>")
    ask(says("x"), template)
    described = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert template.asked[0]["tools"] == [WEATHER, described]
    assert template.asked[0]["messages"] == HI


def test_a_template_without_tools_gets_them_in_the_last_message() -> None:
    template = FakeTemplate(mentions_tools=False)
    answer = ask(says('{"name": "weather", "parameters": {"city": "Oslo"}}'), template, tool_prompt="Call one.")
    assert template.asked[0]["tools"] is None
    content = template.asked[0]["messages"][0]["content"]
    assert content.startswith('hi\n---\n[{"type":"function"')
    assert content.endswith("\nCall one.")
    assert choice_of(answer)["finish_reason"] == "tool_calls"


def test_none_is_a_chat_without_tools() -> None:
    template = FakeTemplate(text="<tool_call>")
    choice = choice_of(ask(says(CALL), template, tool_choice="none"))
    assert template.asked[0]["tools"] is None
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_chat_tokenize_counts_the_tools() -> None:
    template = FakeTemplate(mentions_tools=False)
    answer = Server(template=template).ask("/chat_tokenize", {"messages": HI, "tools": TOOLS})
    assert '"name":"weather"' in answer.json()["templated_text"]


def schema_of(backend: FakeBackend) -> list[str]:
    """The names of the tools that may be called."""
    (request,) = backend.requests
    grammar = from_pb(parameters_of(request))
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    schema = json.loads(grammar.value.partition("%json ")[2])
    return [call["properties"]["name"]["const"] for call in schema["anyOf"]]


def test_required_is_enforced_over_all_tools() -> None:
    backend = says(CALL)
    ask(backend, tool_choice="required")
    assert schema_of(backend) == ["weather", "now"]


@pytest.mark.parametrize(
    "choice", ["now", {"type": "function", "function": {"name": "now"}}, {"function": {"name": "now"}}]
)
def test_a_named_tool_is_enforced(choice: Any) -> None:
    backend = says(CALL)
    ask(backend, tool_choice=choice)
    assert schema_of(backend) == ["now"]


def allowed(mode: str, *names: str, flat: bool = False) -> dict[str, Any]:
    """OpenAI's shape for chats, or the flat one of its Responses API."""
    if flat:
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("flat", [False, True])
def test_allowed_tools_that_are_required_are_enforced(flat: bool) -> None:
    backend = says(CALL)
    ask(backend, tools=[*TOOLS, OTHER], tool_choice=allowed("required", "now", "weather", flat=flat))
    assert schema_of(backend) == ["now", "weather"]


@pytest.mark.parametrize("flat", [False, True])
def test_the_model_may_choose_among_allowed_tools_only(flat: bool) -> None:
    template, backend = FakeTemplate(text="<tool_call>"), says(CALL)
    choice = choice_of(ask(backend, template, tool_choice=allowed("auto", "now", flat=flat)))
    assert [tool["function"]["name"] for tool in template.asked[0]["tools"]] == ["now"]
    assert from_pb(parameters_of(backend.requests[0])) is None
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop"), "of a tool that is not allowed"
    choice = choice_of(ask(says(CALL), tool_choice=allowed("auto", "weather", flat=flat)))
    assert choice["finish_reason"] == "tool_calls"


def test_the_parser_can_be_chosen() -> None:
    server = Server(says(CALL), template=FakeTemplate(), settings={"tool_call_parser": "hermes"})
    answer = server.ask(CHAT, {"messages": HI, "tools": TOOLS})
    assert choice_of(answer)["finish_reason"] == "tool_calls"


def test_an_answer_is_a_call_or_follows_the_response_format() -> None:
    """As in OpenAI's API: agents have tools, and a schema for what they say in the end."""
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "report", "schema": schema}}
    for text, reason in ((CALL, "tool_calls"), ('{"degrees": 18}', "stop")):
        backend = says(text)
        assert choice_of(ask(backend, response_format=shape))["finish_reason"] == reason
        grammar = from_pb(parameters_of(backend.requests[0]))
        assert grammar is not None and "answer: %json" in grammar.value and "degrees" in grammar.value
    backend = says(CALL)
    ask(backend, response_format=shape, tool_choice="required")
    grammar = from_pb(parameters_of(backend.requests[0]))
    assert grammar is not None and "degrees" not in grammar.value, "a call must be made, so there is no text"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_grammar_that_is_not_json_and_tools_exclude_each_other() -> None:
    answer = ask(says("x"), response_format={"type": "regex", "value": "x"})
    problem_of_both = "Tool error: Grammar and tools are mutually exclusive, unless the grammar is a JSON schema"
    assert problem(answer) == (422, None, problem_of_both)
    assert answer.json()["error_type"] == "tool_error"
    assert ask(says("x"), response_format={"type": "text"}).status == 200


@pytest.mark.parametrize("choice", ["sing", {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "sing"}]}])
def test_a_choice_that_is_none_of_the_tools(choice: Any) -> None:
    assert problem(ask(says("x"), tool_choice=choice)) == (422, None, "Tool error: Tool with name sing not found")


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "parameters": "{}"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "arguments": 1}}]}, "tools[0].function.arguments"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [{"function": {"name": "f", "parameters": nested(120)}}]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, "tool_choice"),
    ],
)
def test_what_is_refused(request_: dict[str, Any], param: str) -> None:
    status, named, message = problem(ask(says("x"), **request_))
    assert (status, named) == (400, param)
    assert message
