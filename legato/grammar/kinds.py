"""A grammar as a value: what both programs mean by it. The router checks it, the shard follows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """How to read the text of a grammar."""

    JSON_SCHEMA = "json_schema"  # a schema, as JSON
    JSON_OBJECT = "json_object"  # nothing: any JSON object will do
    REGEX = "regex"  # matches the whole text, anchored or not
    CHOICE = "choice"  # a JSON list of strings, one of which is the text
    LARK = "lark"  # a context-free grammar, in llguidance's dialect of Lark


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must look like, whichever of the APIs said so."""

    kind: GrammarKind
    value: str = ""

    @property
    def is_json(self) -> bool:
        return self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
