"""The grammar for a forced tool call: the call format of the model, with the tool's schema for its arguments.

Where a call is the model's choice and its text has a schema, the answer is either of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from legato.chat.tools.call_reader import NAME
from legato.chat.tools.dialects import HARMONY, HERMES, MISTRAL, Dialect
from legato.chat.tools.requests import Schema, Tool
from legato.grammar.compile import JSON_OPTIONS, lenient
from legato.grammar.declared import as_declared
from legato.grammar.kinds import Grammar, GrammarKind

# Keywords whose values are data, and those whose values are schemas by name.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OPTIONS: Final = {"x-guidance": JSON_OPTIONS}
# Identify a document. Inside another one they would be taken for the beginning of a third.
_IDENTITY: Final = frozenset({"$schema", "$id", "id"})


def call_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    tokens: Mapping[str, int],
    *,
    several: bool,
    schema_lenient: bool = False,
    answer: Schema | None = None,
) -> Grammar:
    """One call of one of the tools, or several in a row; with `answer`, or else a text of that schema. `tokens` are
    those that have names, which no text matches."""
    if dialect is HARMONY:
        assert answer is None, "texts and calls are in messages of their own"
        return _message_to_function(tools, tokens, schema_lenient=schema_lenient)
    schema = call_schema(dialect, tools)
    if dialect in (HERMES, MISTRAL):
        return _between_markers(dialect, schema, answer, tokens, several=several, schema_lenient=schema_lenient)
    definitions = schema.pop("$defs")
    shapes = [schema, {"type": "array", "items": schema, "minItems": 1}] if several else [schema]
    if answer is not None:
        definitions["answer"] = _moved(_without_identity(answer), "#/$defs/answer")
        shapes.append({"$ref": "#/$defs/answer"})
    combined = {"anyOf": shapes} if len(shapes) > 1 else schema
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**combined, "$defs": definitions}))


def call_schema(dialect: Dialect, tools: Sequence[Tool]) -> Schema:
    """Of the JSON object that is a call."""
    definitions = {f"tool{number}": arguments_schema(tool, number) for number, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {NAME: {"const": tool.name}, dialect.arguments: {"$ref": f"#/$defs/tool{number}"}},
            "required": [NAME, dialect.arguments],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    return {"anyOf": calls, "$defs": definitions}


def arguments_schema(tool: Tool, number: int | None) -> Schema:
    """The tool's own schema at its new place; None: it stays the root. A function takes the parameters that it
    declares, and no others."""
    declared: Schema = as_declared({"type": "object", **_without_identity(tool.parameters)})
    moved: Schema = declared if number is None else _moved(declared, f"#/$defs/tool{number}")
    return moved


def _without_identity(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in _IDENTITY}


def _moved(schema: Any, place: str) -> Any:
    """The same schema somewhere inside another: what it says about its own root is now about `place`."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved


def _between_markers(
    dialect: Dialect,
    schema: Schema,
    answer: Schema | None,
    tokens: Mapping[str, int],
    *,
    several: bool,
    schema_lenient: bool,
) -> Grammar:
    """In Lark, which has a place for schemas."""
    text = _embedded(schema, schema_lenient=schema_lenient)
    if dialect is HERMES:
        opening, closing = (_marker(marker, tokens) for marker in ("<tool_call>", "</tool_call>"))
        one, separator = f'{opening} "\\n" call "\\n" {closing}', '"\\n"'
        start = f"one ({separator} one)*" if several else "one"
        rules = [f"start: {start}", f"one: {one}"]
    else:
        calls = 'call (", " call)*' if several else "call"
        rules = [f'start: {_marker("[TOOL_CALLS]", tokens)} "[" {calls} "]"']
    if answer is not None:
        rules[0] += " | answer"
        rules.append(f"answer: %json {_embedded(answer, schema_lenient=schema_lenient)}")
    return Grammar(GrammarKind.LARK, "\n".join([*rules, f"call: %json {text}"]))


def _embedded(schema: Schema, *, schema_lenient: bool) -> str:
    """For a place in Lark. Options go into the schema itself."""
    described = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, **_OPTIONS}))
    return lenient(described).value if schema_lenient else described.value


def _message_to_function(tools: Sequence[Tool], tokens: Mapping[str, int], *, schema_lenient: bool) -> Grammar:
    """One call, in a message after the reasoning: harmony ends the text with it."""
    channel, body, constrain, start, end = (
        _marker(marker, tokens) for marker in ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")
    )
    rules = ["start: analysis? call", "call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    # A token of its own ends a text by itself; one that is spelled out has to be looked for.
    text, after = ("text", end) if "<|end|>" in tokens else ('text[suffix="<|end|>"]', "")
    rules.append(f'analysis: {channel} "analysis" {body} text {after} {start} "assistant"')
    rules.append(f"{text}: /(?s:.*)/")
    for number, tool in enumerate(tools):
        name = json.dumps(f"commentary to=functions.{tool.name} ")
        text = _embedded(arguments_schema(tool, None), schema_lenient=schema_lenient)
        rules.append(f'call{number}: {channel} {name} {constrain} "json" {body} %json {text}')
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _marker(marker: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)
