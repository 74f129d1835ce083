"""Row 23 of the fault table: tools that are too many, clash, make no sense or were never called."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from legato.chat.reasoning.harmony import HarmonyParser
from legato.chat.tools.dialects import DIALECTS
from legato.chat.tools.enforcement import call_grammar
from legato.chat.tools.parser import CallParser, ParsedMessage
from legato.chat.tools.requests import tool_use_of
from legato.grammar.matcher import MaskWriter
from legato.grammar.vocabulary import TokenTrie
from tests.faults.loop_lag import Lag
from tests.faults.scale import cases
from tests.grammar.texts import Choose, at_random, conforms, json_tokenizer, trie_of, walk
from tests.http.asgi import post
from tests.http.routes.openai.fakes import CHAT, HI, Server
from tests.stopwatch import Stopwatch

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}}, "required": ["n"]}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY if parameters is None else parameters}}


def refusal(**request: Any) -> str:
    """Which field was wrong; nothing may have been computed."""
    server = Server()
    answer = server.ask(CHAT, {"messages": HI, **request})
    assert answer.status in (400, 422), answer.body
    assert not server.backend.requests
    return str(answer.json()["error"]["param"] or answer.json()["error"]["message"])


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_thousand_tools_are_served_or_refused_and_nobody_waits(choice: str) -> None:
    body = json.dumps({"messages": HI, "tools": [tool(f"f{i}") for i in range(1000)], "tool_choice": choice}).encode()

    async def main() -> tuple[int, float, float]:
        server, lag, stopwatch = Server(), Lag(), Stopwatch()
        answer = await lag.during(post(server.app, CHAT, body))
        return answer.status, stopwatch.seconds, lag.worst

    status, seconds, lag = asyncio.run(main())
    assert status in (200, 400, 422)
    assert seconds <= 3
    assert lag <= 0.05


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_fifteen_thousand_tools_are_refused_and_nobody_waits(choice: str) -> None:
    """They held the event loop for 0.9 s, and 3 s if the last two had one name."""
    tools = [tool(f"f{i}", {"type": "object"}) for i in range(15_000)]
    body = json.dumps({"messages": HI, "tools": [*tools, tools[-1]], "tool_choice": choice}).encode()

    async def main() -> tuple[int, bytes, float]:
        server, lag = Server(), Lag()
        answer = await lag.during(post(server.app, CHAT, body))
        return answer.status, answer.body, lag.worst

    status, said, lag = asyncio.run(main())
    assert status == 400 and b"at most 1024" in said
    assert lag <= 0.1


def test_two_tools_of_one_name_are_refused_by_it() -> None:
    server = Server()
    answer = server.ask(CHAT, {"messages": HI, "tools": [tool("a"), tool("b"), tool("a", COUNT)]})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "tools" and "'a'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (tool("f", {"type": "array"}), "tools[0].function.parameters.type"),
        (tool("f", []), "tools[0].function.parameters"),
        (tool("f", "x"), "tools[0].function.parameters"),
        (tool(""), "tools[0].function.name"),
        (tool(7), "tools[0].function.name"),  # type: ignore[arg-type]
        ({"type": "function"}, "tools[0].function"),
        ({"type": "retrieval"}, "tools[0]"),
    ],
)
def test_a_tool_that_makes_no_sense_is_refused_by_its_field(bad: Any, field: str) -> None:
    assert refusal(tools=[bad]) == field


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"a": {"type": "nothing"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}},
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_where_a_call_must_follow_it(parameters: Any) -> None:
    assert refusal(tools=[tool("f", parameters)], tool_choice="required") == "tools"


@pytest.mark.parametrize("choice", ["g", {"function": {"name": "g"}}, {"type": "function", "function": {"name": "F"}}])
def test_a_choice_of_an_unknown_tool_is_refused_by_its_name(choice: Any) -> None:
    assert "not found" in refusal(tools=[tool("f")], tool_choice=choice)


@pytest.mark.parametrize("choice", [7, [], {"function": 1}, {}, True])
def test_a_choice_that_makes_no_sense_is_refused(choice: Any) -> None:
    assert refusal(tools=[tool("f")], tool_choice=choice) == "tool_choice"


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    "messages",
    [
        [*HI, {"role": "tool", "tool_call_id": "1", "content": "x"}],
        [*HI, CALLED, {"role": "tool", "tool_call_id": "2", "content": "x"}],
        [*HI, {"role": "tool", "tool_call_id": "1", "content": "x"}, CALLED],
        [*HI, {**CALLED, "tool_calls": [7]}, {"role": "tool", "tool_call_id": "7", "content": "x"}],
        [*HI, {**CALLED, "tool_calls": 7}, {"role": "tool", "tool_call_id": "7", "content": "x"}],
    ],
)
def test_a_result_of_a_call_that_nobody_made_is_refused(messages: Any) -> None:
    assert refusal(messages=messages).endswith("tool_call_id")


@pytest.mark.parametrize("call_id", [{"tool_call_id": "1"}, {"tool_call_id": None}, {}])
def test_a_result_of_a_call_or_of_none_in_particular_is_served(call_id: Any) -> None:
    messages = [*HI, CALLED, {"role": "tool", "content": "x", **call_id}]
    assert Server().ask(CHAT, {"messages": messages}).status == 200


def without_reasoning(choose: Choose, trie: TokenTrie) -> Choose:
    """Between harmony's channels "analysis" and "commentary" the second: a random text never ends the first."""

    def chosen(allowed: list[int]) -> int:
        calls = [each for each in allowed if trie.tokenizer.decode_bytes([each]).startswith(b"c")]
        others = [each for each in allowed if not trie.tokenizer.decode_bytes([each]).startswith((b"a", b"c"))]
        return choose(allowed if others or not calls else calls)

    return chosen


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_is_required_has_valid_arguments_whatever_the_model_likes(name: str) -> None:
    """Random models under the grammar: every text is a call, and every call has arguments of its tool's schema."""
    schemas = {"weather": CITY, "count": COUNT, "now": {"type": "object", "properties": {}}}
    use = tool_use_of([tool(each, parameters) for each, parameters in schemas.items()], "required")
    assert use is not None
    trie = trie_of(json_tokenizer())
    writer = MaskWriter(trie, num_threads=1)
    grammar = call_grammar(DIALECTS[name], use.forced, {}, several=False)
    for seed in range(cases(full=500, quick=40)):
        text = walk(grammar, without_reasoning(at_random(seed, trie), trie), trie, writer, most=2000)
        parser = HarmonyParser(use.names) if name == "harmony" else CallParser(DIALECTS[name], use.names)
        message = ParsedMessage()
        message.add(parser.feed(text) + parser.finish())
        (call,) = message.calls
        wanted = {**schemas[call.name], "additionalProperties": False}
        assert conforms(json.loads(call.arguments), wanted), text
        assert message.content == ""
