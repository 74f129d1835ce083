"""Two hundred lists of tools that people wrote: out of the package of the Berkeley Function-Calling Leaderboard.

Which ones is decided here, before anything is sent:

1. Of the five kinds of questions with one turn and Python's types, `PER_KIND` each, in the order of the SHA-256 of
   their ids, so that no kind and no author comes first.
2. No list of tools twice: many questions share theirs.
3. Only lists in which every tool can be called at all. A few demand a value that cannot exist, such as an array that
   must be one of five strings.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

KINDS = ("simple_python", "multiple", "live_simple", "live_multiple", "parallel_multiple")
PER_KIND = 40
# The leaderboard describes parameters in the words of Python.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
# Keywords whose values are data, and those whose values are schemas by name.
_DATA = ("default", "enum", "const")


@dataclass(frozen=True)
class Question:
    id: str
    messages: list[Any]
    # In OpenAI's shape.
    tools: list[Any]

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def questions() -> list[Question]:
    seen: set[str] = set()
    return [question for kind in KINDS for question in _chosen(kind, seen)]


def _chosen(kind: str, seen: set[str]) -> Iterator[Question]:
    found = 0
    for question in sorted(_read(kind), key=lambda question: hashlib.sha256(question.id.encode()).digest()):
        text = json.dumps(question.tools, sort_keys=True)
        if text in seen or not all(map(callable_at_all, question.schemas.values())):
            continue
        seen.add(text)
        yield question
        found += 1
        if found == PER_KIND:
            return


def _read(kind: str) -> Iterator[Question]:
    (wheel,) = (Path(os.environ["LEGATO_CLIENTS"]) / "tool-schemas").glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        lines = package.read(f"bfcl_eval/data/BFCL_v4_{kind}.json").decode().splitlines()
    for case in map(json.loads, lines):
        tools = [{"type": "function", "function": {**tool, "parameters": _json_schema(tool["parameters"])}}
                 for tool in case["function"]]  # fmt: skip
        yield Question(case["id"], case["question"][0], tools)


def _json_schema(described: Any) -> Any:
    if isinstance(described, list):
        return [_json_schema(each) for each in described]
    if not isinstance(described, dict):
        return described
    schema = {key: value if key in _DATA else _json_schema(value) for key, value in described.items()}
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


def callable_at_all(schema: Any) -> bool:
    """Whether some value is valid: one of the `enum`, and with it whatever else is required."""
    if "enum" in schema and not any(Draft202012Validator(schema).is_valid(value) for value in schema["enum"]):
        return False
    properties = schema.get("properties", {})
    return all(callable_at_all(properties[name]) for name in schema.get("required", ()) if name in properties)
