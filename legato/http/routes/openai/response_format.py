"""`response_format`: what the text must look like, as OpenAI's clients say it and as TGI's do."""

from __future__ import annotations

from legato.grammar.kinds import Grammar
from legato.http.shapes import read_grammar


def grammar_of(response_format: object) -> Grammar | None:
    """None: any text will do."""
    return read_grammar(response_format, "response_format")
