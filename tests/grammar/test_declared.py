"""`properties` in a client's schema mean an object with these properties, as in TGI, and never more than it allows."""

from __future__ import annotations

from typing import Any

import pytest

from legato.grammar.declared import as_declared
from legato.grammar.matcher import MaskWriter
from legato.grammar.vocabulary import TokenTrie
from tests.grammar.texts import accepts, schema

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
# As in TGI's guide to guidance: no `type`.
ANIMALS = {
    "properties": {"location": TEXT, "seen": NUMBER, "animals": {"type": "array", "items": TEXT}},
    "required": ["location", "seen", "animals"],
}
# As pydantic writes a model in a model.
PERSON = {
    "$defs": {"Pet": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}},
    "type": "object",
    "properties": {"pet": {"anyOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}], "default": None}},
}


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        (ANIMALS, ['{"location":"park","seen":3,"animals":["cat"]}'], ['"park"', "3", "[]", "{}"]),
        ({"properties": {"a": NUMBER}}, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":2}', "1"]),
        ({"type": "object", "properties": {"a": {"properties": {"b": NUMBER}}}}, ['{"a":{"b":1}}'], ['{"a":1}']),
        ({"type": ["object", "null"], "properties": {"a": NUMBER}}, ["null", '{"a":1}'], ['{"c":1}']),
        ({"type": "array", "items": {"properties": {"a": NUMBER}}}, ['[{"a":1}]'], ["[1]", '[{"c":1}]']),
        (PERSON, ['{"pet":null}', '{"pet":{"name":"Tom"}}'], ['{"pet":{"name":"Tom","age":3}}', '{"dog":1}']),
        # What says more than `properties` is left as it is.
        ({"type": "object", "properties": {"a": NUMBER}, "additionalProperties": TEXT}, ['{"c":""}'], ['{"c":1}']),
        ({"type": "object", "properties": {"a": NUMBER}, "required": ["b"]}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "object"}, ['{"c":1}', "{}"], ["1"]),
        ({"enum": [1], "properties": {"a": NUMBER}}, ["1"], ["2"]),
        (
            {
                "$defs": {"A": {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}},
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": NUMBER}, "required": ["b"]}],
            },
            ['{"a":1,"b":2}'],
            ['{"a":1}', "1"],
        ),
    ],
    ids=lambda case: str(case)[:60] if isinstance(case, dict) else "",
)
def test_properties_are_those_of_an_object(
    declared: dict[str, Any], good: list[str], bad: list[str], trie: TokenTrie, writer: MaskWriter
) -> None:
    grammar = schema(as_declared(declared))
    assert [text for text in good if not accepts(grammar, text, trie, writer)] == []
    assert [text for text in bad if accepts(grammar, text, trie, writer)] == []
    asked = schema(declared)
    assert [text for text in good if not accepts(asked, text, trie, writer)] == [], "not what the client allows"


def test_what_is_no_object_is_left_alone() -> None:
    for other in (True, {}, TEXT, {"properties": 3}, {"$defs": 3, "anyOf": 3, "required": 3, "items": 3}):
        assert as_declared(other) == other
