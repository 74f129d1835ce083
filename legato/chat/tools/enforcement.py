"""The grammar of an answer that must be a call: the dialect's way of writing, the tool's schema for its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from legato.chat.tools.call_reader import NAME
from legato.chat.tools.dialects import HARMONY, HERMES, MISTRAL, Dialect
from legato.chat.tools.requests import Schema, Tool
from legato.grammar.compile import JSON_OPTIONS, lenient
from legato.grammar.kinds import Grammar, GrammarKind

# Keywords whose values are data, and those whose values are schemas by name.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OPTIONS: Final = {"x-guidance": JSON_OPTIONS}
# Identify a document. Inside another one they would be taken for the beginning of a third.
_IDENTITY: Final = frozenset({"$schema", "$id", "id"})
# With one of these, what an object may have is not said by its `properties` alone.
_ELSEWHERE: Final = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)


def call_grammar(
    dialect: Dialect, tools: Sequence[Tool], tokens: Mapping[str, int], *, several: bool, schema_lenient: bool = False
) -> Grammar:
    """One call of one of the tools, or several in a row. `tokens` are those that have names, which no text matches."""
    if dialect is HARMONY:
        return _message_to_function(tools, tokens, schema_lenient=schema_lenient)
    schema = call_schema(dialect, tools)
    if dialect in (HERMES, MISTRAL):
        return _between_markers(dialect, schema, tokens, several=several, schema_lenient=schema_lenient)
    if several:
        definitions = schema.pop("$defs")
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1}], "$defs": definitions}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


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
    schema = {key: value for key, value in tool.parameters.items() if key not in _IDENTITY}
    closed: Schema = _closed({"type": "object", **schema})
    moved: Schema = closed if number is None else _moved(closed, f"#/$defs/tool{number}")
    return moved


def _closed(schema: Any) -> Any:
    """Objects have the properties that they declare, all the way down: small models would go on to invent others until
    nothing is left. Where a part of a schema is combined with others, what is missing here may be declared there."""
    if not isinstance(schema, dict) or _ELSEWHERE & schema.keys():
        return schema
    closed = dict(schema)
    if isinstance(properties := schema.get("properties"), dict):
        closed["properties"] = {name: _closed(each) for name, each in properties.items()}
        closed["additionalProperties"] = False
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


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
    dialect: Dialect, schema: Schema, tokens: Mapping[str, int], *, several: bool, schema_lenient: bool
) -> Grammar:
    """In Lark, which has a place for schemas. Options for these go into the schema itself."""
    described = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, **_OPTIONS}))
    text = lenient(described).value if schema_lenient else described.value
    if dialect is HERMES:
        opening, closing = (_marker(marker, tokens) for marker in ("<tool_call>", "</tool_call>"))
        one, separator = f'{opening} "\\n" call "\\n" {closing}', '"\\n"'
        start = f"one ({separator} one)*" if several else "one"
        rules = [f"start: {start}", f"one: {one}"]
    else:
        calls = 'call (", " call)*' if several else "call"
        rules = [f'start: {_marker("[TOOL_CALLS]", tokens)} "[" {calls} "]"']
    return Grammar(GrammarKind.LARK, "\n".join([*rules, f"call: %json {text}"]))


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
        described = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**arguments_schema(tool, None), **_OPTIONS}))
        text = lenient(described).value if schema_lenient else described.value
        rules.append(f'call{number}: {channel} {name} {constrain} "json" {body} %json {text}')
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _marker(marker: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)
