"""Grammars in protobuf messages: TGI's two kinds with TGI's numbers, additional kinds with new numbers."""

from __future__ import annotations

from typing import Protocol

from legato.grammar.kinds import Grammar, GrammarKind
from legato.pb import generate_pb2 as pb

_TYPES = {
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_TYPE_JSON,
    GrammarKind.REGEX: pb.GRAMMAR_TYPE_REGEX,
    GrammarKind.JSON_OBJECT: pb.GRAMMAR_TYPE_JSON_OBJECT,
    GrammarKind.CHOICE: pb.GRAMMAR_TYPE_CHOICE,
    GrammarKind.LARK: pb.GRAMMAR_TYPE_LARK,
}
_KINDS = {number: kind for kind, number in _TYPES.items()}


class Carrier(Protocol):
    """A message with room for a grammar."""

    grammar: str
    grammar_type: pb.GrammarType


def grammar_type(grammar: Grammar | None) -> pb.GrammarType:
    return pb.GRAMMAR_TYPE_NONE if grammar is None else _TYPES[grammar.kind]


def from_pb(message: Carrier) -> Grammar | None:
    """None for no grammar, and for a kind that a newer client may know."""
    kind = _KINDS.get(message.grammar_type)
    return None if kind is None else Grammar(kind, message.grammar)
