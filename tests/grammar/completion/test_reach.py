"""What a schema can oblige to: never less than llguidance makes a text pay."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings

from legato.grammar.compile import compile_grammar
from legato.grammar.completion.endings import Endings, Place
from legato.grammar.completion.reach import Reach, reach_of
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from tests.grammar.schemas import schemas
from tests.grammar.texts import json_tokenizer, schema, trie_of

TRIE = trie_of(json_tokenizer())
ENDINGS = Endings(TRIE)


def reach(value: Any) -> Reach:
    found = reach_of(schema(value))
    assert found is not None
    return found


@settings(max_examples=80, deadline=None)
@given(schemas())
def test_the_bound_of_a_document_is_one(wanted: Any) -> None:
    try:
        position = compile_grammar(schema(wanted), TRIE)
    except GrammarError:
        assume(False)
    way = ENDINGS.shortest(position, Place(), 300)
    assume(way is not None)
    assert way is not None
    assert len(way) - 1 <= reach(wanted).whole, TRIE.tokenizer.decode_bytes(way)


def test_a_key_is_found_beside_another_of_as_many_tokens() -> None:
    wanted = {"type": "object", "properties": {"name": {}, "é": {"type": "string"}}, "required": ["é"]}
    way = ENDINGS.shortest(compile_grammar(schema(wanted), TRIE), Place(), 300)
    assert way is not None and TRIE.tokenizer.decode_bytes(way[:-1]) == '{"é":""}'.encode()


def test_a_key_is_found_that_begins_like_another() -> None:
    properties = {"a": {"type": "string"}, "a_long_property_name": {"type": "string"}}
    wanted = {"type": "object", "properties": properties, "required": ["a_long_property_name"]}
    way = ENDINGS.shortest(compile_grammar(schema(wanted), TRIE), Place(), 300)
    assert way is not None and TRIE.tokenizer.decode_bytes(way[:-1]) == b'{"a_long_property_name":""}'


OBJECT = {"type": "object", "properties": {"name": {}}, "required": ["name"]}
PAIR = {"type": "array", "items": {"enum": [True]}, "minItems": 2}
WORDS = {"enum": ['n\u00e9"x\\', "ab"]}


@pytest.mark.parametrize(
    ("properties", "required", "text"),
    [
        ({"name": OBJECT, "age": PAIR}, "age", '{"age":[true,true]}'),
        ({"ab": {}, 'q"t': {"minLength": 3}, "a": {"type": "string"}, "b": {"type": "string"}}, "b", '{"b":""}'),
    ],
)
def test_optional_keys_do_not_hide_the_one_that_is_missing(properties: Any, required: str, text: str) -> None:
    wanted = {"type": "object", "properties": properties, "required": [required]}
    way = ENDINGS.shortest(compile_grammar(schema(wanted), TRIE), Place(), 300)
    assert way is not None and TRIE.tokenizer.decode_bytes(way[:-1]) == text.encode()


def test_long_values_do_not_hide_as_many_short_ones() -> None:
    item = {"type": "object", "properties": {"age": WORDS, "name": {"type": "boolean"}}, "required": ["age"]}
    wanted = {"type": "array", "items": item, "minItems": 5}
    way = ENDINGS.shortest(compile_grammar(schema(wanted), TRIE), Place(), 300)
    assert (
        way is not None
        and TRIE.tokenizer.decode_bytes(way[:-1]) == json.dumps(5 * [{"age": "ab"}], separators=(",", ":")).encode()
    )


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK])
def test_only_json_has_one(kind: GrammarKind) -> None:
    assert reach_of(Grammar(kind, '["a"]')) is None


@pytest.mark.parametrize("around", ["start: /.*/ call", 'start: call\n%ignore " "', "start: call\nW: /a+/"])
def test_json_among_other_text_has_none(around: str) -> None:
    assert reach_of(Grammar(GrammarKind.LARK, around + '\ncall: %json {"type": "object"}')) is None


def test_json_between_fixed_words_owes_them_too() -> None:
    lark = (
        'start: "<call>" call "</call>"\ncall: %json {"type": "object", "properties": {"a/%": {}}, "required": ["a/%"]}'
    )
    found = reach_of(Grammar(GrammarKind.LARK, lark))
    assert found is not None and found.required == ("a/%",)
    assert len('<call>{"a/%":0}</call>') <= found.whole <= found.decision < 100


def test_required_keys_are_owed_and_optional_ones_are_not() -> None:
    few = {"type": "object", "properties": {"key": {"type": "string"}}, "additionalProperties": False}
    assert reach(few).whole == 2
    assert reach({**few, "required": ["key"]}).whole >= len('{"key":""}')


@pytest.mark.parametrize(
    "value",
    [
        {"enum": ["a", "b" * 50]},
        {"anyOf": [{"type": "null"}, {"const": "b" * 50}]},
        {"type": "string", "minLength": 50},
        {"type": "string", "pattern": "^(ab|c){25}$"},
        {"type": "array", "minItems": 25},
        {"type": "object", "properties": {"b" * 50: {}}},
        {"$ref": "#/$defs/long"},
    ],
    ids=json.dumps,
)
def test_the_dearest_decision_counts(value: Any) -> None:
    inner = {"type": "array", "items": value, "$defs": {"long": {"const": "b" * 50}}}
    assert reach(inner).decision >= 50


def test_a_schema_that_contains_itself_has_a_bound() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    assert len('{"next":null}') <= reach(node).whole < 100


@pytest.mark.parametrize(
    "value",
    [
        {"type": "object", "minProperties": 3},
        {"not": {"type": "string"}},
        {"allOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {"$ref": "https://elsewhere.example/schema.json"},
        {"type": "object", "properties": {"a": {"items": [{}]}}},
    ],
    ids=json.dumps,
)
def test_what_is_not_understood_has_none(value: Any) -> None:
    assert reach(value).decision == math.inf
