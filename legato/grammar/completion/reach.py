"""How far from its end one decision can take a JSON text: a bound, read off the schema, in bytes.

Whoever opens an object owes its required keys; whoever begins one of the longer values of an enum owes the rest of it.
A text that has more tokens left than all that is open may cost need not be watched at all, and almost all texts are
like that. So this is asked once for a schema, and spares `closing.py` its work. It may be too large, never too small:
a schema with something in it that is not understood here has no bound, and its texts are watched from the beginning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from legato.grammar.kinds import EMBEDDED_SCHEMA, Grammar, GrammarKind

# Bytes. Half of a surrogate pair and its escapes, a number, an empty value: what any JSON text may owe at any time.
_LEAST: Final = 16
_ANYTHING: Final = 4
# llguidance's own patterns for `format`; the longest is a UUID.
_FORMAT: Final = 64
_LARK_PART: Final = re.compile(rf'"(?:\\.|[^"\\\n])*"|(?P<schema>{EMBEDDED_SCHEMA}\s*(?={{))')
_COUNT: Final = re.compile(r"\{(\d+)")
_NUMBER_LIMITS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that oblige to something that is not computed here. What is no keyword at all obliges to nothing.
_NOT_UNDERSTOOD: Final = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
    }
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
    | {"contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "additionalItems"}
)
_OF_TYPES: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(_NUMBER_LIMITS),
    "integer": frozenset(_NUMBER_LIMITS),
    "boolean": frozenset(),
    "null": frozenset(),
}


@dataclass(frozen=True, slots=True)
class Reach:
    whole: float  # what the document costs from its beginning
    decision: float  # what one more decision costs
    required: tuple[str, ...] = ()  # keys that objects in it must have


_UNKNOWN: Final = Reach(math.inf, math.inf)


@lru_cache(maxsize=32)
def reach_of(grammar: Grammar) -> Reach | None:
    """None: the grammar is not JSON, and its texts are not led to an end."""
    if grammar.kind is GrammarKind.LARK:
        return _reach_between_words(grammar.value)
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return _reach_of_schema({"type": "object"})
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _reach_of_schema(json.loads(grammar.value))
    return None


def _reach_of_schema(schema: Any) -> Reach:
    try:
        return _Bounds(schema).reach()
    except (_NotUnderstood, RecursionError):
        return _UNKNOWN


def _reach_between_words(lark: str) -> Reach | None:
    """Of schemas with nothing but fixed words around them, as calls of tools have it. Each may come again and again."""
    parts: list[Reach] = []
    rest, words, place = "", 0, 0
    while (found := _LARK_PART.search(lark, place)) is not None:
        rest += lark[place : found.start()]
        place = found.end()
        if not found["schema"]:
            words += len(found[0])
            continue
        try:
            schema, place = json.JSONDecoder().raw_decode(lark, place)
        except (ValueError, RecursionError):
            return None
        parts.append(_reach_of_schema(schema))
    if not parts or {"/", "%"} & set(rest + lark[place:]):  # a regular expression, or a directive
        return None
    whole = words + sum(part.whole for part in parts)
    required = dict.fromkeys(key for part in parts for key in part.required)
    return Reach(whole, max(whole, *(part.decision for part in parts)), tuple(required))


class _NotUnderstood(Exception):
    pass


class _Bounds:
    """Every part of a schema, and the bytes of a value that it allows: not the shortest perhaps, but a short one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts = self._reachable([self._understood(root)], self._children)
        self._bytes: dict[int, float] = dict.fromkeys(self._parts, math.inf)

    def reach(self) -> Reach:
        self._settle()
        document = self._reachable([self._root], self._alternatives)
        inside = [child for part in document.values() for child in self._contents(part)]
        parts = self._reachable(inside, self._children)
        whole = [cost for part in document.values() for cost in self._beginnings(part)]
        costs = [self._entry(part, key) for part in (document | parts).values() for key in _properties(part)]
        costs += [cost for part in parts.values() for cost in self._beginnings(part)]
        if not all(map(_is_plain, document.values())):  # else what the document costs is decided when it begins
            costs += whole
        required = dict.fromkeys(key for part in self._parts.values() for key in _required(part))
        return Reach(max(_finite(whole), default=math.inf), max(_finite(costs), default=0) + _LEAST, tuple(required))

    def _reachable(self, first: list[Any], successors: Callable[[Any], Iterator[Any]]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        waiting = list(first)
        while waiting:
            part = waiting.pop()
            if id(part) not in found:
                found[id(part)] = part
                waiting += successors(part)
        return found

    def _understood(self, part: Any) -> Any:
        if not isinstance(part, dict | bool):
            raise _NotUnderstood
        if isinstance(part, dict) and (part.keys() & _NOT_UNDERSTOOD or ("$id" in part and part is not self._root)):
            raise _NotUnderstood
        return part

    def _children(self, part: Any) -> Iterator[Any]:
        yield from self._alternatives(part)
        yield from self._contents(part)

    def _alternatives(self, part: Any) -> Iterator[Any]:
        """Schemas of the same value."""
        if isinstance(part, dict):
            for key in ("anyOf", "oneOf", "allOf"):
                yield from map(self._understood, part.get(key, ()))
            if "$ref" in part:
                yield self._understood(self._target(part["$ref"]))

    def _contents(self, part: Any) -> Iterator[Any]:
        """Schemas of values within the value."""
        if isinstance(part, dict):
            yield from map(self._understood, _properties(part).values())
            yield from map(self._understood, part.get("prefixItems", ()))
            yield from (self._understood(part[key]) for key in ("additionalProperties", "items") if key in part)

    def _target(self, reference: str) -> Any:
        """Only references within the schema are followed, and only by path."""
        head, *steps = reference.split("/")
        found = self._root
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if head != "#" or not isinstance(found, dict) or step not in found:
                raise _NotUnderstood
            found = found[step]
        if head != "#":
            raise _NotUnderstood
        return found

    def _settle(self) -> None:
        """Schemas refer to themselves: round after round, until no part gets shorter."""
        changed = True
        while changed:
            changed = False
            for key, part in self._parts.items():
                size = self._least(part)
                changed |= size < self._bytes[key]
                self._bytes[key] = min(size, self._bytes[key])

    def _of(self, part: Any) -> float:
        return self._bytes[id(part)]

    def _least(self, part: Any) -> float:
        if part is True or part == {}:
            return _ANYTHING
        if part is False:
            return math.inf
        sizes = []
        if "$ref" in part:
            sizes.append(self._of(self._target(part["$ref"])))
        sizes += map(self._of, part.get("allOf", ()))
        sizes += [min(map(self._of, part[key]), default=math.inf) for key in ("anyOf", "oneOf") if key in part]
        if values := _values(part):
            sizes.append(min(map(_written, values)))
        else:
            own = [name for name in _types(part) if _OF_TYPES[name] & part.keys()]
            if own or (not sizes and "type" in part):
                sizes.append(min(self._least_of_type(part, name) for name in _types(part)))
        if len(sizes) > 1:  # what they demand together may be more than the sum
            raise _NotUnderstood
        return sizes[0] if sizes else _ANYTHING

    def _least_of_type(self, part: dict[str, Any], name: str) -> float:
        if name == "object":
            return 2 + sum(self._entry(part, key) for key in _required(part))
        if name == "array":
            first = part.get("prefixItems", [])[: part.get("minItems", 0)]
            others = part.get("minItems", 0) - len(first)
            other = self._of(part["items"]) if "items" in part else _ANYTHING
            return 2.0 + sum(1 + self._of(item) for item in first) + (others * (1 + other) if others else 0)
        if name == "string":
            patterns = _pattern_bytes(part.get("pattern", "")) + (_FORMAT if "format" in part else 0)
            return 2.0 + float(part.get("minLength", 0)) + patterns
        return 1.0 + _ANYTHING + sum(len(str(part.get(key, ""))) for key in _NUMBER_LIMITS)

    def _entry(self, part: dict[str, Any], key: str) -> float:
        value = _properties(part).get(key, part.get("additionalProperties", True))
        return _written(key) + 2 + (_ANYTHING if value is True else self._of(value))

    def _beginnings(self, part: Any) -> Iterator[float]:
        """What values of this part may cost, once a text has decided for one of its kind."""
        yield self._of(part)
        if isinstance(part, dict):
            values = _values(part)
            yield from map(_written, values)
            yield from (self._least_of_type(part, name) for name in _types(part) if not values)


def _finite(costs: list[float]) -> list[float]:
    """Without those that no text can pay: a value that contains itself has no end."""
    return [cost for cost in costs if cost < math.inf]


def _is_plain(part: Any) -> bool:
    """Whether there is only one kind of value, an object or an array, and but one way to begin it."""
    if not isinstance(part, dict) or _values(part):
        return False
    alternatives = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
    return len(alternatives) == 1 or "$ref" in part or part.get("type") in ("object", "array")


def _properties(part: Any) -> dict[str, Any]:
    return part.get("properties", {}) if isinstance(part, dict) else {}


def _required(part: Any) -> list[str]:
    return part.get("required", []) if isinstance(part, dict) else []


def _types(part: dict[str, Any]) -> list[str]:
    named = part.get("type", [*_OF_TYPES])
    types = named if isinstance(named, list) else [named]
    if not set(types) <= _OF_TYPES.keys():
        raise _NotUnderstood
    return types


def _values(part: dict[str, Any]) -> list[Any]:
    return [part["const"]] if "const" in part else part.get("enum", [])


def _written(value: Any) -> int:
    return len(json.dumps(value))


def _pattern_bytes(pattern: str) -> float:
    """Every part of the pattern as often as all counts together say, and twice as long for what must be escaped."""
    if not pattern:
        return 0
    return 2.0 * len(pattern.encode()) * math.prod(max(1, int(count)) for count in _COUNT.findall(pattern))
