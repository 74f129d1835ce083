from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.chat.tools.dialects import DIALECTS, HERMES, JSON, LLAMA3, MISTRAL, Dialect
from legato.chat.tools.json_text import JsonText
from legato.chat.tools.parser import CallBegins, CallGoesOn, CallParser, Content, Event, ParsedMessage

NAMES = frozenset({"weather", "math.add", "名前"})
Result = tuple[str, list[tuple[str, Any]]]


def read(dialect: Dialect, pieces: list[str], *, several: bool = True) -> ParsedMessage:
    parser = CallParser(dialect, NAMES, several=several)
    message = ParsedMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message


def result(message: ParsedMessage) -> Result:
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.calls]


OSLO = ("weather", {"city": "Oslo"})
ADD = ("math.add", {"a": 1, "b": [{"c": -2.5e3}, None, True]})
ADD_TEXT = '{"a": 1, "b": [{"c": -2.5e3}, null, true]}'
TRICKY = ("weather", {"city": 'a}"{]</tool_call>\\ [TOOL_CALLS] é😀\n```'})
TRICKY_TEXT = '{"city": "a}\\"{]</tool_call>\\\\ [TOOL_CALLS] é😀\\n```"}'

CASES: list[tuple[str, Dialect, str, Result]] = [
    (
        "one call",
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ("", [OSLO]),
    ),
    (
        "text before and after",
        HERMES,
        'Let me see. <b>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n\nDone, ok?',
        ("Let me see. <b>\n\nDone, ok?", [OSLO]),
    ),
    (
        "several calls",
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        f'<tool_call>{{"name": "math.add", "arguments": {ADD_TEXT}}}</tool_call>\n',
        ("", [OSLO, ADD]),
    ),
    (
        "braces, markers and unicode in strings",
        HERMES,
        f'<tool_call>{{"name": "weather", "arguments": {TRICKY_TEXT}}}</tool_call>',
        ("", [TRICKY]),
    ),
    (
        "arguments before the name",
        HERMES,
        '<tool_call>{"id": 7, "arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        ("", [OSLO]),
    ),
    (
        "arguments in a string",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>',
        ("", [OSLO]),
    ),
    ("no arguments", HERMES, '<tool_call>{"name": "weather"}</tool_call>', ("", [("weather", {})])),
    (
        "null arguments and an escaped key",
        HERMES,
        '<tool_call>{"n\\u0061me": "\\u540d前", "arguments": null}</tool_call>',
        ("", [("名前", {})]),
    ),
    (
        "a line break in a string",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        ("", [("weather", {"city": "a\nb\tc"})]),
    ),
    (
        "no JSON",
        HERMES,
        "a <tool_call>\nweather(Oslo)\n</tool_call>",
        ("a <tool_call>\nweather(Oslo)\n</tool_call>", []),
    ),
    (
        "an unknown name",
        HERMES,
        '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', []),
    ),
    (
        "no name",
        HERMES,
        '<tool_call>{"arguments": {}}</tool_call>',
        ('<tool_call>{"arguments": {}}</tool_call>', []),
    ),
    (
        "arguments that are no object",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', []),
    ),
    (
        "a good call after a broken one",
        HERMES,
        '<tool_call>{"name"<tool_call><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
        ('<tool_call>{"name"<tool_call>', [OSLO]),
    ),
    ("half a marker", HERMES, " a <tool_cal> \n <tool_", (" a <tool_cal> \n <tool_", [])),
    ("white space only", HERMES, " \n", (" \n", [])),
    ("an opening without end", HERMES, '<tool_call>{"name": "wea', ('<tool_call>{"name": "wea', [])),
    ("bare JSON", LLAMA3, '\n{"name": "weather", "parameters": {"city": "Oslo"}}', ("", [OSLO])),
    (
        "the tag",
        LLAMA3,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; '
        f'{{"name": "math.add", "parameters": {ADD_TEXT}}}',
        ("", [OSLO, ADD]),
    ),
    (
        "the built-in way of writing calls",
        LLAMA3,
        '<|python_tag|>search.call(query="x")',
        ('<|python_tag|>search.call(query="x")', []),
    ),
    ("an answer in JSON", LLAMA3, '{"answer": {"name": "x"}}', ('{"answer": {"name": "x"}}', [])),
    (
        "JSON in the middle of text",
        LLAMA3,
        'Like {"name": "weather", "parameters": {}}',
        ('Like {"name": "weather", "parameters": {}}', []),
    ),
    ("a list in a dialect without lists", LLAMA3, '[{"name": "weather"}]', ('[{"name": "weather"}]', [])),
    (
        "a list",
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, '
        f'{{"name": "math.add", "arguments": {ADD_TEXT}}}]',
        ("", [OSLO, ADD]),
    ),
    ("a name before the arguments", MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', ("", [OSLO])),
    (
        "names before arguments, with text",
        MISTRAL,
        f'So:[TOOL_CALLS]weather{{"city": "Oslo"}}[TOOL_CALLS]math.add[ARGS]{ADD_TEXT}',
        ("So:", [OSLO, ADD]),
    ),
    ("a name that no tool has", MISTRAL, "[TOOL_CALLS]x[ARGS]{}", ("[TOOL_CALLS]x[ARGS]{}", [])),
    (
        "an element that is no call",
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, 5]',
        (" 5]", [OSLO]),
    ),
    ("generic", JSON, f'{{"name": "weather", "parameters": {TRICKY_TEXT}}}', ("", [TRICKY])),
    (
        "a list of generic calls",
        JSON,
        f'[{{"name": "weather", "parameters": {{"city": "Oslo"}}}}, {{"name": "math.add", "arguments": {ADD_TEXT}}}]\n',
        ("", [OSLO, ADD]),
    ),
    (
        "a block of code",
        JSON,
        'Sure!\n```json\n{"name": "weather", "parameters": {"city": "Oslo"}}\n```\n',
        ("Sure!", [OSLO]),
    ),
    *(
        (
            f"a block of code with {word}",
            dialect,
            f'Sure!\n```json\n{{"name": "weather", "{word}": {{"city": "Oslo"}}}}\n```\nDone.',
            ("Sure!\nDone.", [OSLO]),
        )
        for dialect in (HERMES, LLAMA3, MISTRAL)
        for word in ("arguments", "parameters")
    ),
    (
        "a block of code that is no call",
        HERMES,
        'Like so:\n```json\n{"name": "x", "city": 5}\n```\n',
        ('Like so:\n```json\n{"name": "x", "city": 5}\n```\n', []),
    ),
    (
        "a block of code with words",
        MISTRAL,
        "```json\nweather is a word {}",
        ("```json\nweather is a word {}", []),
    ),
    ("a list of numbers", JSON, "[1, 2] are two", ("[1, 2] are two", [])),
]
EXPECTED = [
    pytest.param(dialect, text, expected, id=f"{dialect.name}: {name}") for name, dialect, text, expected in CASES
]


@pytest.mark.parametrize(("dialect", "text", "expected"), EXPECTED)
def test_a_text_at_once(dialect: Dialect, text: str, expected: Result) -> None:
    assert result(read(dialect, [text])) == expected


@pytest.mark.parametrize(("dialect", "text", "expected"), EXPECTED)
def test_a_text_cut_anywhere(dialect: Dialect, text: str, expected: Result) -> None:
    for cut in range(len(text)):
        assert result(read(dialect, [text[:cut], text[cut:]])) == expected
    assert result(read(dialect, list(text))) == expected


@pytest.mark.parametrize(("dialect", "text", "expected"), EXPECTED)
def test_what_is_sent_of_arguments_is_the_beginning_of_json(dialect: Dialect, text: str, expected: Result) -> None:
    """At whichever character the text ends."""
    for end in range(len(text)):
        for call in read(dialect, [text[:end]]).calls:
            reader = JsonText()
            assert call.arguments.startswith("{")
            assert all(reader.feed(character) for character in call.arguments)


def test_id_and_name_come_first_and_then_the_arguments() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' * 2
    parser = CallParser(HERMES, NAMES)
    events: list[Event] = [event for character in text for event in parser.feed(character)]
    kinds = [(type(event), event.index) for event in events if not isinstance(event, Content)]
    arguments = len('{"city": "Oslo"}')
    assert kinds == [
        (CallBegins, 0),
        *[(CallGoesOn, 0)] * arguments,
        (CallBegins, 1),
        *[(CallGoesOn, 1)] * arguments,
    ]
    ids = {event.id for event in events if isinstance(event, CallBegins)}
    assert len(ids) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


def test_text_is_not_held_back_unless_it_may_be_a_marker() -> None:
    parser = CallParser(HERMES, NAMES)
    shown = [parser.feed(character) for character in "ab <c"]
    assert shown == [[Content("a")], [Content("b")], [], [], [Content(" <c")]]


def test_arguments_are_not_held_back() -> None:
    parser = CallParser(JSON, NAMES)
    parser.feed('{"name": "weather", "parameters": {')
    assert parser.feed('"ci') == [CallGoesOn(0, '"ci')]


def test_a_call_that_breaks_off_in_its_arguments_stays_what_it_was() -> None:
    message = read(HERMES, ['<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>'])
    assert [call.arguments for call in message.calls] == ['{"city": ']
    assert message.content == "Oslo}}</tool_call>"


def test_only_the_first_call_where_several_are_not_wanted() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "weather", "arguments": {}}]'
    assert result(read(MISTRAL, [text], several=False)) == ("", [OSLO])


PARTS = ["<tool_call>", "</tool_call>", '{"name": "weather", ', '"arguments": {"a": "', '"}}', "[TOOL_CALLS]", "[ARGS]"]
PARTS += ["weather", "{", "}", "[", "]", '"', "\\", ",", ";", "```json", "```", " ", "\n", "x", "<|python_tag|>"]


@given(st.sampled_from(sorted(DIALECTS)), st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_any_cutting_of_any_text_gives_the_same(dialect: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = read(DIALECTS[dialect], [text]), read(DIALECTS[dialect], pieces)
    assert cut.content == whole.content
    assert [(call.name, call.arguments) for call in cut.calls] == [(c.name, c.arguments) for c in whole.calls]


@given(st.sampled_from(sorted(DIALECTS)), st.text(alphabet='abc <>{}[]`\n"', max_size=30))
def test_text_without_calls_comes_through_word_for_word(dialect: str, text: str) -> None:
    assert read(DIALECTS[dialect], [text]).content == text


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_long_texts_take_little_time_per_character(dialect: Dialect) -> None:
    text = " " * 3000 + "word " * 10_000 + '{"name": ' * 1000
    assert read(dialect, [text]).content == text
