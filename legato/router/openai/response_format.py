"""`response_format`: what the text must look like, as OpenAI's clients say it and as TGI's do.

    OpenAI   {"type": "text"}   {"type": "json_object"}   {"type": "json_schema", "json_schema": {"schema": {...}}}
    TGI      {"type": "json", "value": {...}}   {"type": "json_schema", "value": {"schema": {...}}}
             {"type": "regex", "value": "..."}
    ours     {"type": "choice", "value": ["...", ...]}   {"type": "lark", "value": "..."}

TGI calls `json` also `json_object`, and takes its schema as an object or as the text of one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from legato.router.errors import InvalidRequest
from legato.router.state import Grammar, GrammarKind

_FIELD = "response_format"
_TYPES = "text, json_object, json_schema, regex, choice or lark"
_ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)


def grammar_of(response_format: dict[str, Any] | None) -> Grammar | None:
    """None: any text will do."""
    if response_format is None:
        return None
    kind, value = response_format.get("type"), response_format.get("value")
    if kind == "text":
        return None
    if kind in ("json", "json_object"):
        return _json(value, f"{_FIELD}.value")
    if kind == "json_schema":
        place = "value" if value is not None else "json_schema"
        return _json(_schema_in(response_format.get(place), f"{_FIELD}.{place}"), f"{_FIELD}.{place}.schema")
    if kind in ("regex", "lark"):
        return Grammar(GrammarKind(kind), _text(value))
    if kind == "choice":
        return Grammar(GrammarKind.CHOICE, _texts(value))
    raise InvalidRequest(f"`{_FIELD}.type` must be {_TYPES}", f"{_FIELD}.type")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"`{_FIELD}.value` must be a string", f"{_FIELD}.value")
    return value


def _texts(value: object) -> str:
    if not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        raise InvalidRequest(f"`{_FIELD}.value` must be a list of strings", f"{_FIELD}.value")
    return msgspec.json.encode(value).decode()


def _schema_in(wrapper: object, place: str) -> object:
    if not isinstance(wrapper, dict):
        raise InvalidRequest(f"`{place}` must be an object with a `schema`", place)
    return wrapper.get("schema")


def _json(schema: object, place: str) -> Grammar:
    """Without a schema, an object, whatever it holds."""
    if schema is None:
        return _ANY_OBJECT
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"`{place}` is not JSON: {error}", place) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{place}` must be a JSON schema", place)
    return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())
