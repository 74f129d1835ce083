"""JSON schemas as their authors mean them: `properties` says that it is an object, and which properties it has.

By the letter of JSON Schema, `{"properties": {"a": {}}}` allows any text in quotes, and any number of further
properties; TGI, OpenAI's strict mode and most engines read it as an object with `a` and nothing else. Small models
would otherwise go on to invent properties until no tokens are left. `additionalProperties` is obeyed where it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# With one of these, what an object may have is not said by its `properties` alone.
_ELSEWHERE: Final = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
# Says nothing about what is allowed.
_REMARKS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "discriminator", "$schema", "$id"}
)
_DEFINITIONS: Final = ("$defs", "definitions")
_VALUES: Final = frozenset({"type", "enum", "const"})


def as_declared(schema: Any) -> Any:
    """The same schema with `type` and `additionalProperties` where they follow from `properties`, all the way down.
    Whatever it allows, the given one allows, too."""
    # A definition that is one part of several must leave room for the others' properties.
    return _declared(schema, not any(map(_combines, _parts(schema))))


def _declared(schema: Any, alone: bool) -> Any:
    """`alone`: definitions are not combined with others."""
    if not isinstance(schema, dict):
        return schema
    declared = dict(schema)
    for key in _DEFINITIONS:
        if alone and isinstance(named := schema.get(key), dict):
            declared[key] = {name: _declared(each, alone) for name, each in named.items()}
    if isinstance(choices := schema.get("anyOf"), list) and _asserted(schema) == {"anyOf"}:
        declared["anyOf"] = [_declared(each, alone) for each in choices]
    if _ELSEWHERE & schema.keys():
        return declared
    if isinstance(properties := schema.get("properties"), dict):
        declared["properties"] = {name: _declared(each, alone) for name, each in properties.items()}
        if not _VALUES & schema.keys():
            declared["type"] = "object"
        if properties.keys() >= _names(schema.get("required")):
            declared["additionalProperties"] = False
    if "items" in schema:
        declared["items"] = _declared(schema["items"], alone)
    return declared


def _names(required: Any) -> set[str]:
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _asserted(schema: dict[str, Any]) -> set[str]:
    return schema.keys() - _REMARKS - set(_DEFINITIONS)


def _combines(schema: dict[str, Any]) -> bool:
    """Whether a reference in it, or behind it, is not the whole of what is allowed there."""
    references = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef", "dependentSchemas"} & schema.keys()
    return bool(references) and (not references <= {"$ref", "anyOf"} or len(_asserted(schema)) > 1)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in it, properties and data included."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
