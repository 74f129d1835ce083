"""Parses the format constraints of requests: `grammar` in the native API, `response_format` in OpenAI's.

    OpenAI   {"type": "text"}   {"type": "json_object"}   {"type": "json_schema", "json_schema": {"schema": {...}}}
    TGI      {"type": "json", "value": {...}}   {"type": "json_schema", "value": {"schema": {...}}}
             {"type": "regex", "value": "..."}
    others   {"type": "json_object", "schema": {...}}   {"type": "json_schema", "schema": {...}}
    ours     {"type": "choice", "value": ["...", ...]}   {"type": "lark", "value": "..."}

TGI calls `json` also `json_object`, and takes its schema as an object or as the text of one. The others are LangChain
and the companies whose APIs it speaks: a schema that is not looked for where they put it is not enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from legato.api.errors import InvalidRequest
from legato.grammar.compile import check_bytes
from legato.grammar.declared import as_declared
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind

_TYPES = "text, json, json_object, json_schema, regex, choice or lark"
_JSON_TYPES = ("json", "json_object", "json_schema")
_ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
_SPACES = b" \t\r\n"
_BESIDE_A_SCHEMA = {"name", "description", "strict"}
_AROUND_A_SCHEMA = 4096  # bytes of names and descriptions that are not counted


def read_grammar(shape: object, field: str) -> Grammar | None:
    """None: any text will do. `field` is what the client calls it."""
    if isinstance(shape, msgspec.Raw):
        shape = decoded_shape(shape, field)
    if shape is None:
        return None
    if not isinstance(shape, Mapping):
        raise InvalidRequest(f"`{field}` must be an object with a `type`", field)
    kind, value, place = shape.get("type"), shape.get("value"), f"{field}.value"
    if kind == "text":
        return None
    if kind in _JSON_TYPES and value is None and shape.get("json_schema") is None and shape.get("schema") is not None:
        return _json(shape["schema"], f"{field}.schema")
    if kind in ("json", "json_object"):
        return _json(value, place)
    if kind == "json_schema":
        return _wrapped_schema(shape, field)
    if kind in ("regex", "lark"):
        return Grammar(GrammarKind(kind), _text(value, place))
    if kind == "choice":
        return Grammar(GrammarKind.CHOICE, _texts(value, place))
    raise InvalidRequest(f"`{field}.type` must be {_TYPES}", f"{field}.type")


def decoded_shape(raw: msgspec.Raw, field: str) -> object:
    """Not before its size is known: to make objects of a megabyte of schema takes 20 ms of the event loop.
    Without spaces and ends of lines it has no more bytes than its compact form."""
    try:
        check_bytes(len(bytes(raw).translate(None, _SPACES)) - _AROUND_A_SCHEMA)
        return msgspec.json.decode(raw)
    except GrammarError as error:
        raise InvalidRequest(f"grammar is not valid: {error}", field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{field}` is not JSON: {error}", field) from None


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"`{place}` must be a string", place)
    return value


def _texts(value: object, place: str) -> str:
    if not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        raise InvalidRequest(f"`{place}` must be a list of strings", place)
    return msgspec.json.encode(value).decode()


def _wrapped_schema(shape: Mapping[str, Any], field: str) -> Grammar:
    """The schema with its name: TGI has it in `value`, OpenAI in a field of the type's name."""
    inner = "value" if shape.get("value") is not None else "json_schema"
    wrapper, place = shape.get(inner), f"{field}.{inner}"
    # With anything else in it, it is the schema itself, which would not be enforced.
    if not isinstance(wrapper, Mapping) or ("schema" not in wrapper and wrapper.keys() - _BESIDE_A_SCHEMA):
        raise InvalidRequest(f"`{place}` must be an object with a `schema`", place)
    return _json(wrapper.get("schema"), f"{place}.schema")


def _json(schema: object, place: str) -> Grammar:
    """Without a schema, an object, whatever it holds."""
    if schema is None:
        return _ANY_OBJECT
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"`{place}` is not JSON: {error}", place) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{place}` must be a JSON schema", place)
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(as_declared(schema)).decode())
    except RecursionError:
        raise InvalidRequest(f"`{place}` is nested too deeply", place) from None
