"""A grammar as a value, shared by router and shards: the router checks it, the shard enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

# What stands before a schema in a Lark grammar.
EMBEDDED_SCHEMA: Final = "%json"


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
    def has_json(self) -> bool:
        """Whether the text is JSON or has some in it, the numbers of which must end."""
        if self.kind is GrammarKind.LARK:
            return EMBEDDED_SCHEMA in self.value
        return self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
