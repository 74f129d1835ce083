"""Schemas at random: everything that obliges a text to go on, and everything that lets it go on for ever."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

NAMES = ("name", "age", "a", "b", "a_long_property_name", 'q"t', "é")
# Recursive, and never the cheapest way to the end.
NODE: Any = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
PATTERNS = ("^[a-c]{2}-[0-9]+$", "^(ab)*c$", "^$|^.{30}$", "^[A-Z][a-z]*$", "^[0-9]{3}-[0-9]{4}$")
WORDS = ("a", "ab", "abc" * 9, 'né"x\\', "x y z")


def _simple() -> st.SearchStrategy[Any]:
    lengths = st.tuples(st.sampled_from([0, 3, 20]), st.sampled_from([0, 2, 30]))
    return st.one_of(
        st.sampled_from([{}, {"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]),
        st.sampled_from([{"$ref": "#/$defs/node"}, {"type": ["string", "null"]}, {"type": ["object", "integer"]}]),
        st.sampled_from([0, 5, 1000, -7]).map(lambda low: {"type": "integer", "minimum": low}),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.lists(st.sampled_from([*WORDS, 12345, True, None]), min_size=1, max_size=4).map(lambda some: {"enum": some}),
        lengths.map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}),
        st.sampled_from([3, 20]).map(lambda low: {"type": "string", "minLength": low}),
    )


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def described(properties: dict[str, Any], required: set[str], others: Any) -> Any:
        wanted = [name for name in properties if name in required]
        schema = {"type": "object", "properties": properties, "required": wanted}
        return schema if others is None else {**schema, "additionalProperties": others}

    others = st.one_of(st.none(), st.just(False), values)
    return st.builds(
        described, st.dictionaries(st.sampled_from(NAMES), values, max_size=4), st.sets(st.sampled_from(NAMES)), others
    )


def _arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def described(items: Any, low: int, more: int | None) -> Any:
        schema = {"type": "array", "items": items, "minItems": low}
        return schema if more is None else {**schema, "maxItems": low + more}

    return st.builds(described, values, st.sampled_from([0, 1, 2, 5]), st.none() | st.integers(0, 2))


def _extended(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    choices = st.lists(values, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(_objects(values), _arrays(values), choices)


def schemas() -> st.SearchStrategy[Any]:
    def rooted(schema: Any) -> Any:
        return {**json.loads(json.dumps(schema)), "$defs": {"node": NODE}}

    return st.recursive(_simple(), _extended, max_leaves=6).map(rooted)
