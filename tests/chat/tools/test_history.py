from __future__ import annotations

import json
from typing import Any

from legato.chat.tools.dialects import HERMES, JSON, MISTRAL
from legato.chat.tools.history import PROMPT, ToolHistory
from legato.chat.tools.requests import tool_use_of

WEATHER = {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}}
USE = tool_use_of([{"type": "function", "function": {**WEATHER, "strict": True}}], None)
KNOWS = ToolHistory(HERMES, mentions_tools=True, arguments="object")
KNOWS_NOT = ToolHistory(JSON, mentions_tools=False, arguments="object")


def conversation(arguments: Any = '{"city": "Oslo"}') -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def test_earlier_arguments_become_objects() -> None:
    assert KNOWS.messages(conversation(), USE) == conversation({"city": "Oslo"})


def test_earlier_arguments_stay_strings_for_templates_that_print_them() -> None:
    history = ToolHistory(HERMES, mentions_tools=True, arguments="string")
    assert history.messages(conversation(), USE) == conversation()
    assert history.messages(conversation({"city": "Oslo"}), USE) == conversation('{"city":"Oslo"}')


def test_arguments_that_are_no_json_are_left_alone() -> None:
    assert KNOWS.messages(conversation("{"), USE) == conversation("{")


def test_templates_get_tools_in_openais_shape() -> None:
    assert KNOWS.tools(USE) == [{"type": "function", "function": WEATHER}]


def test_tgis_word_for_parameters_is_replaced() -> None:
    use = tool_use_of([{"type": "function", "function": {"name": "f", "arguments": {"type": "object"}}}], None)
    assert KNOWS.tools(use) == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_call_and_result_keep_one_id_where_the_template_insists_on_nine_letters() -> None:
    history = ToolHistory(MISTRAL, mentions_tools=True, arguments="object")
    _, call, answer = history.messages(conversation(), USE)
    call_id = call["tool_calls"][0]["id"]
    assert call_id == answer["tool_call_id"]
    assert len(call_id) == 9
    assert call_id.isalnum()
    again = history.messages([call, answer], USE)
    assert again == [call, answer]


def test_a_template_that_knows_no_tools_is_told_by_the_user() -> None:
    messages = KNOWS_NOT.messages([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}], USE)
    said, line, tools, prompt = messages[0]["content"].split("\n")
    assert (said, line, prompt) == ("hi", "---", PROMPT)
    assert json.loads(tools) == [{"type": "function", "function": WEATHER}]
    assert messages[1] == {"role": "assistant", "content": "So"}
    assert KNOWS_NOT.tools(USE) is None


def test_the_prompt_about_tools_is_the_clients() -> None:
    use = tool_use_of([{"type": "function", "function": WEATHER}], None, prompt="Call!")
    (parts,) = KNOWS_NOT.messages([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], use)
    assert parts["content"][0] == {"type": "text", "text": "hi"}
    assert parts["content"][1]["text"].endswith("\nCall!")
    (message,) = KNOWS.messages([{"role": "user", "content": "hi"}], use)
    assert message["content"] == "hi\n---\nCall!"


def test_earlier_calls_are_written_out_for_a_template_that_knows_none() -> None:
    messages = KNOWS_NOT.messages(conversation(), None)
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": '{"name":"weather","parameters":{"city":"Oslo"}}'},
        {"role": "user", "content": "sunny"},
    ]


def test_a_model_reads_about_tools_before_it_reads_their_results() -> None:
    messages = KNOWS_NOT.messages(conversation(), USE)
    assert messages[0]["content"].startswith("hi\n---\n") and messages[0]["content"].endswith(PROMPT)
    assert messages[-1] == {"role": "user", "content": "sunny"}


def test_without_a_message_of_the_user_the_last_one_tells_about_tools() -> None:
    (message,) = KNOWS_NOT.messages([{"role": "system", "content": "Be brief."}], USE)
    assert message["content"].startswith("Be brief.\n---\n")


def test_what_the_client_sent_is_not_changed() -> None:
    messages = conversation()
    KNOWS.messages(messages, USE)
    KNOWS_NOT.messages(messages, USE)
    assert messages == conversation()


def test_answers_and_results_without_content_are_empty() -> None:
    question, call, result = conversation({"city": "Oslo"})
    reasoned = {"role": "assistant", "reasoning_content": "So"}
    messages = [question, call, {**result, "content": None}, {**reasoned, "content": None}, reasoned]
    empty = {**reasoned, "content": ""}
    assert KNOWS.messages(messages, USE) == [question, call, {**result, "content": ""}, empty, empty]
    assert KNOWS_NOT.messages(messages, None)[-2:] == [empty, empty]
