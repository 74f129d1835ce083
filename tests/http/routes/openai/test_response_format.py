from __future__ import annotations

from typing import Any

import pytest

from legato.api.errors import InvalidRequest
from legato.grammar.kinds import Grammar, GrammarKind
from legato.http.routes.openai.options import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_GRAMMAR = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}',
)


@pytest.mark.parametrize("nothing", [None, {"type": "text"}])
def test_any_text_will_do(nothing: Any) -> None:
    assert grammar_of(nothing) is None


@pytest.mark.parametrize(
    "shape",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json", "value": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
    ],
)
def test_one_schema_in_all_its_shapes(shape: dict[str, Any]) -> None:
    assert grammar_of(shape) == AS_GRAMMAR


@pytest.mark.parametrize("shape", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n"}}])
def test_without_a_schema_any_object_will_do(shape: dict[str, Any]) -> None:
    assert grammar_of(shape) == Grammar(GrammarKind.JSON_OBJECT)


def test_the_other_kinds() -> None:
    assert grammar_of({"type": "regex", "value": "a+"}) == Grammar(GrammarKind.REGEX, "a+")
    assert grammar_of({"type": "lark", "value": 'start: "a"'}) == Grammar(GrammarKind.LARK, 'start: "a"')
    assert grammar_of({"type": "choice", "value": ["a", "b"]}) == Grammar(GrammarKind.CHOICE, '["a","b"]')


@pytest.mark.parametrize(
    ("shape", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "regex"}, "response_format.value"),
        ({"type": "choice", "value": []}, "response_format.value"),
        ({"type": "json", "value": "{"}, "response_format.value"),
        ({"type": "json", "value": 3}, "response_format.value"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "value": {"schema": 3}}, "response_format.value.schema"),
        # The schema itself, where its name and the schema belong.
        ({"type": "json_schema", "value": SCHEMA}, "response_format.value"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "response_format.json_schema"),
        ({"type": "json_object", "schema": 3}, "response_format.schema"),
    ],
)
def test_shapes_that_mean_nothing(shape: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grammar_of(shape)
    assert error.value.param == param
