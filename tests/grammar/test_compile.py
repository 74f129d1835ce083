"""Each kind of grammar allows what its author would expect, and what is wrong with one is said by name."""

from __future__ import annotations

import json

import pytest

from legato.grammar.compile import MAX_BYTES, compile_grammar, lenient
from legato.grammar.errors import GrammarError, TooComplex, UnsupportedKeyword
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter
from legato.grammar.rehearsal import rehearse
from legato.grammar.vocabulary import TokenTrie
from tests.grammar.texts import accepts, json_tokenizer, schema, trie_of

REGEX, CHOICE, LARK = GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(PERSON), ['{"name":"Ada"}', '{ "name": "é\\n", "age": -3 }'], ['{"age":3}', '{"name":3}', "[]", ""]),
        (schema({}), ["null", "[1,{}]", '"x"', "-1.5e3"], ["nul", "{", "01", ""]),
        (schema({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ['"b"', "2"]),
        (schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), ["[]", "[true,false]"], ["[1]"]),
        (Grammar(GrammarKind.JSON_OBJECT), ["{}", '{"a":[1]}'], ["[]", "1", ""]),
        (Grammar(REGEX, "[0-9]{2,3}"), ["12", "123"], ["1", "1234", "ab"]),
        (Grammar(REGEX, "^(yes|no)$"), ["yes", "no"], ["ye", "yesno", " yes"]),
        (Grammar(REGEX, "a/b\n\\/"), ["a/b\n/"], ["a/b"]),
        (Grammar(REGEX, ""), [""], ["a"]),
        (Grammar(CHOICE, '["yes", "yesterday", ""]'), ["yes", "yesterday", ""], ["yest", "no"]),
        (Grammar(LARK, 'start: "a" start "b" | "c"'), ["c", "aacbb"], ["aacb", "cc"]),
        (Grammar(LARK, 'start: "<" %json {"type": "integer"} ">"'), ["<12>"], ["<x>", "12"]),
    ],
    ids=lambda case: f"{case.kind.value} {case.value[:30]}" if isinstance(case, Grammar) else "",
)
def test_a_grammar_allows_what_it_says_and_nothing_else(
    grammar: Grammar, good: list[str], bad: list[str], trie: TokenTrie, writer: MaskWriter
) -> None:
    assert [text for text in good if not accepts(grammar, text, trie, writer)] == []
    assert [text for text in bad if accepts(grammar, text, trie, writer)] == []


def test_choices_may_contain_anything(trie: TokenTrie, writer: MaskWriter) -> None:
    odd = ['say "x"', "back\\slash", "new\nline", "nul\0", "\x7f", "😀", "\u2028", "$ {x} | y", "</s>", "/"]
    grammar = Grammar(CHOICE, json.dumps(odd))
    unspecial = [text for text in odd if text != "</s>"]  # the tokenizer makes a special token of this one
    assert [text for text in unspecial if not accepts(grammar, text, trie, writer)] == []


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "keyword `uniqueItems` is"),
        ({"properties": {"a": {"not": {}}}}, "keyword `not` is"),
        ({"if": {}, "then": {}}, "keywords `if`, `then` are"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "`oneOf`"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "`minProperties`"),
        ({"type": "string", "format": "iri"}, "`format` iri"),
        ({"$ref": "https://example.com/s.json"}, "https://example.com/s.json"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_named(value: object, named: str, trie: TokenTrie) -> None:
    with pytest.raises(UnsupportedKeyword, match=named):
        compile_grammar(schema(value), trie)


@pytest.mark.parametrize(
    ("value", "ignored"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"not": {}}}, ["`not`", "`uniqueItems`"]),
        ({"type": "string", "format": "iri"}, ["`format` iri"]),
        ({"x-guidance": {"whitespace_flexible": False}, "if": {}}, ["`if`"]),
    ],
)
def test_a_lenient_reading_ignores_it_and_says_so(
    value: object, ignored: list[str], trie: TokenTrie, writer: MaskWriter
) -> None:
    assert rehearse(lenient(schema(value)), trie, writer) == ignored


def test_a_lenient_reading_still_enforces_the_rest(trie: TokenTrie, writer: MaskWriter) -> None:
    grammar = lenient(schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    assert accepts(grammar, "[1,1]", trie, writer)
    assert not accepts(grammar, '["a"]', trie, writer)


def test_there_is_nothing_lenient_about_a_regex() -> None:
    assert lenient(Grammar(REGEX, "(?=a)")) == Grammar(REGEX, "(?=a)")


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "must be an object"),
        (schema({"type": "person"}), "Invalid type: person"),
        (schema({"type": "integer", "minimum": 5, "maximum": 1}), "minimum .* is greater than maximum"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"type": "string", "pattern": "("}), "regex: unclosed group"),
        (schema({"$ref": "#/$defs/nobody"}), "nobody"),
        (Grammar(REGEX, "(?=a)b"), "regex: look-around"),
        (Grammar(REGEX, r"(a)\1"), "regex: backreferences"),
        (Grammar(REGEX, r"\bword"), "regex: look-around"),
        (Grammar(REGEX, "a\\"), "regex: it ends with a backslash"),
        (Grammar(REGEX, "\ud800"), "surrogate"),
        (Grammar(CHOICE, "[]"), "at least one string"),
        (Grammar(CHOICE, '["a", 1]'), "at least one string"),
        (Grammar(CHOICE, "a or b"), "not JSON"),
        (Grammar(LARK, ""), "start"),
        (Grammar(LARK, "start: somebody"), "somebody"),
        (Grammar(LARK, "{}"), "expecting rule"),
    ],
    ids=lambda case: f"{case.kind.value} {case.value[:30]!a}" if isinstance(case, Grammar) else "",
)
def test_a_malformed_grammar_is_refused_with_its_problem(grammar: Grammar, problem: str, trie: TokenTrie) -> None:
    with pytest.raises(GrammarError, match=problem) as refusal:
        compile_grammar(grammar, trie)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_a_text_beyond_the_limit_is_not_even_parsed(trie: TokenTrie) -> None:
    with pytest.raises(TooComplex, match=str(MAX_BYTES)):
        compile_grammar(Grammar(REGEX, "a" * (MAX_BYTES + 1)), trie)


def test_a_grammar_that_allows_no_text_is_refused_at_its_rehearsal(trie: TokenTrie, writer: MaskWriter) -> None:
    with pytest.raises(GrammarError, match="no token of the model"):
        rehearse(schema({"$ref": "#"}), trie, writer)


def test_a_schema_that_reaches_a_limit_later_is_refused_at_its_rehearsal(trie: TokenTrie, writer: MaskWriter) -> None:
    """Its first mask is merely incomplete: a text would have to be `{}`."""
    many = schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}})
    with pytest.raises(GrammarError, match="too complex"):
        rehearse(many, trie, writer)


def test_a_model_without_an_end_cannot_follow_grammars() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        TokenTrie(json_tokenizer().to_str(), 10, 10, [])


def test_a_tokenizer_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        TokenTrie('{"version": "1.0"}', 10, 10, [1])


def test_a_model_may_have_fewer_rows_than_its_tokenizer_has_tokens(writer: MaskWriter) -> None:
    """The closing brace is one of the tokens that the model lacks."""
    brace = json_tokenizer().token_to_id("}")
    small = trie_of(json_tokenizer(), vocab_size=brace)
    with pytest.raises(GrammarError, match="no token of the model"):
        rehearse(Grammar(REGEX, "}"), small, MaskWriter(small, num_threads=1))
