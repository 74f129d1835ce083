"""Compiles a grammar to a matcher. All calls of llguidance's compiler are here.

Every limit on a grammar is here, too. llguidance counts its own work ("fuel") and gives up when a limit is reached;
what it does not count is watched by the process that checks grammars first (`checker.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits

from legato.grammar.errors import GrammarError, TooComplex, from_message
from legato.grammar.kinds import EMBEDDED_SCHEMA, Grammar, GrammarKind
from legato.grammar.vocabulary import TokenTrie

# Bytes of a grammar's text. The largest schemas in use are a tenth of that.
MAX_BYTES: Final = 256 << 10
# Models that run out of ideas write white space, too; JSON never needs this much in one place.
JSON_OPTIONS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
_ANY_OBJECT: Final = '{"type":"object"}'
_OPTIONS: Final = "x-guidance"
# In a Lark grammar: comments, strings and regular expressions, in which anything may stand, and what begins a schema.
# Those that lack their end are matched, too: else the search would begin anew at every escaped quote.
_LARK_TOKEN: Final = re.compile(
    rf'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|(?P<schema>{EMBEDDED_SCHEMA}\s*(?={{))'
)
_DECODER: Final = json.JSONDecoder()

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,  # some 10 ms
    max_grammar_size=250_000,
    step_lexer_fuel=100_000,  # 7 ms for a mask, and
    step_max_items=25_000,  # 1 ms
    max_items_in_row=2_000,
    max_lexer_states=100_000,  # up to 150 MB over the life of a grammar
    verbose_errors=False,
)


def compile_grammar(grammar: Grammar, trie: TokenTrie) -> LLMatcher:
    """A matcher at the beginning of a text. Copies of it are cheap and share what they learn. GrammarError."""
    matcher = LLMatcher(trie.tokenizer, source(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise from_message(matcher.get_error())
    return matcher


def source(grammar: Grammar) -> str:
    """The grammar in llguidance's own format. GrammarError for what is malformed already at first sight."""
    check_size(grammar)
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=JSON_OPTIONS)  # type: ignore[arg-type]
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _schema_source(grammar.value)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(_complete_regex(grammar.value))
    # As a list with one grammar: text that happens to begin with a brace would be taken for such a list itself.
    lark = _alternatives(grammar.value) if grammar.kind is GrammarKind.CHOICE else _with_options(grammar.value)
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def check_size(grammar: Grammar) -> None:
    try:
        size = len(grammar.value.encode())
    except UnicodeEncodeError:
        raise GrammarError("the text is not valid Unicode: it contains half of a surrogate pair") from None
    check_bytes(size)


def check_bytes(size: int) -> None:
    if size > MAX_BYTES:
        raise TooComplex(f"it has {size} bytes, more than the limit of {MAX_BYTES}")


def lenient(grammar: Grammar) -> Grammar:
    """The same schema with the order to ignore what is not supported. Other grammars have nothing to ignore."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    schema = _parse(grammar.value)
    if not isinstance(schema, dict):
        return grammar
    options = schema.get(_OPTIONS)
    options = {**(options if isinstance(options, dict) else {}), "lenient": True}
    return Grammar(grammar.kind, json.dumps({**schema, _OPTIONS: options}))


def _schema_source(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        if "Expecting object" in str(error):
            raise GrammarError("a JSON schema must be an object") from None
        if "recursion limit" in str(error):
            raise TooComplex("the schema is nested too deeply") from None
        raise GrammarError(f"the schema is not JSON: {error}") from None


def _complete_regex(regex: str) -> str:
    """llguidance puts the regex between slashes, where a lone backslash at the end would take the slash along."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise GrammarError("regex: it ends with a backslash that escapes nothing")
    return regex


def _alternatives(text: str) -> str:
    choices = _parse(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("a choice must be a list of at least one string")
    # One terminal, in upper case: a rule of its own for each would make the parser try them one by one.
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _with_options(lark: str) -> str:
    """llguidance has no default options for the schemas in a Lark grammar, so they are written into each, unless its
    author did so."""
    parts, place = [], 0
    for start, _, schema in embedded_schemas(lark):
        if _OPTIONS not in schema:
            parts.append(
                lark[place : start + 1] + f'"{_OPTIONS}": {json.dumps(JSON_OPTIONS)}' + (", " if schema else "")
            )
            place = start + 1
    return "".join([*parts, lark[place:]])


def embedded_schemas(lark: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where each begins and ends in a Lark grammar. What is no JSON is left for llguidance to complain about."""
    place = 0
    while (found := _LARK_TOKEN.search(lark, place)) is not None:
        place = found.end()
        if found["schema"]:
            try:
                schema, end = _DECODER.raw_decode(lark, place)
            except (ValueError, RecursionError):
                continue
            yield place, end, schema
            place = end


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the text is not JSON: {error}") from None
