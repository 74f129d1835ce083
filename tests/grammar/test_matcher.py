"""Masks: exactly what the grammar allows, to the very end, however a text got where it is."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.grammar.compile import compile_grammar
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.scanner import MAX_DIGITS
from legato.grammar.vocabulary import TokenTrie
from tests.grammar.texts import EOS, allowed_ids, at_random, begin, conforms, json_tokenizer, schema, trie_of, walk

TRIE = trie_of(json_tokenizer())
WRITER = MaskWriter(TRIE, num_threads=1)

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"enum": ["a", "b"]}]}, "minItems": 1, "maxItems": 4},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    {"type": "integer", "minimum": -20, "maximum": 130},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [
        {"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["next"], "additionalProperties": False}}},
    {},
]  # fmt: skip


@pytest.mark.parametrize("wanted", SCHEMAS, ids=json.dumps)
def test_every_text_under_the_masks_of_a_schema_conforms_to_it(wanted: object) -> None:
    for seed in range(12):
        text = walk(schema(wanted), at_random(seed, TRIE), TRIE, WRITER)
        assert conforms(json.loads(text), wanted), text


@pytest.mark.parametrize("regex", ["[a-z]{3}[0-9]?", "(ab|a)*c", "\\+[0-9]{1,3} (0|[1-9][0-9]{0,5})", "é?😀{1,2}"])
def test_every_text_under_the_masks_of_a_regex_matches_it(regex: str) -> None:
    for seed in range(12):
        text = walk(Grammar(GrammarKind.REGEX, regex), at_random(seed, TRIE), TRIE, WRITER)
        assert re.fullmatch(regex, text), text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab0 {é", max_size=5), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_choice_stays_within_reach_and_nothing_else_is(choices: list[str], seed: int) -> None:
    """Not every token that would do is in a mask: where only one text can follow, it has its usual tokens."""
    matcher = begin(Grammar(GrammarKind.CHOICE, json.dumps(choices)), TRIE)
    choose, text = at_random(seed, TRIE), b""
    left = {choice.encode() for choice in choices}
    while True:
        WRITER.fill_masks([matcher])
        allowed = allowed_ids(matcher)
        assert (EOS in allowed) == (text in left)
        longer = {text + TRIE.bytes_of(token_id) for token_id in allowed if token_id != EOS}
        assert all(any(choice.startswith(each) for choice in left) for each in longer)
        assert all(any(choice.startswith(each) for each in longer) for choice in left - {text})
        token_id = choose(allowed)
        if token_id == EOS:
            return
        text += TRIE.bytes_of(token_id)
        left = {choice for choice in left if choice.startswith(text)}
        matcher.accept([token_id], TRIE)


def test_after_the_last_token_only_the_end_is_allowed(trie: TokenTrie, writer: MaskWriter) -> None:
    matcher = begin(Grammar(GrammarKind.REGEX, "[0-9]{3}"), trie)
    matcher.accept(json_tokenizer().encode("123").ids, trie)
    writer.fill_masks([matcher])
    assert allowed_ids(matcher) == [EOS]
    assert matcher.is_complete
    for _ in range(2):  # also after the end itself: steps may be ahead of the router
        matcher.accept([EOS], trie)
        writer.fill_masks([matcher])
        assert allowed_ids(matcher) == [EOS]


def test_where_a_text_may_end_or_go_on_the_end_is_one_of_the_choices(trie: TokenTrie, writer: MaskWriter) -> None:
    matcher = begin(Grammar(GrammarKind.REGEX, "a+"), trie)
    writer.fill_masks([matcher])
    assert EOS not in allowed_ids(matcher)
    matcher.accept(json_tokenizer().encode("a").ids, trie)
    writer.fill_masks([matcher])
    assert EOS in allowed_ids(matcher) and not matcher.is_complete


@pytest.mark.parametrize("wanted", SCHEMAS[:4], ids=json.dumps)
def test_a_text_that_comes_back_with_its_tokens_goes_on_as_if_it_had_never_left(wanted: object) -> None:
    compiled = compile_grammar(schema(wanted), TRIE)
    stayed, ids, choose = Matcher(compiled, has_json=True), [], at_random(3, TRIE)
    for _ in range(25):
        back = Matcher(compiled, has_json=True)
        back.accept(ids, TRIE)
        WRITER.fill_masks([stayed, back])
        assert allowed_ids(stayed) == allowed_ids(back)
        ids.append(choose(allowed_ids(stayed)))
        stayed.accept(ids[-1:], TRIE)


def test_a_token_that_was_not_allowed_is_an_error_of_its_text_alone(trie: TokenTrie, writer: MaskWriter) -> None:
    compiled = compile_grammar(Grammar(GrammarKind.REGEX, "a*"), trie)
    broken, sound = Matcher(compiled, has_json=False), Matcher(compiled, has_json=False)
    broken.accept(json_tokenizer().encode("b").ids, trie)
    writer.fill_masks([broken, sound])
    assert broken.error is not None and broken.mask is None
    assert allowed_ids(sound)
    broken.accept(json_tokenizer().encode("a").ids, trie)
    writer.fill_masks([broken])
    assert broken.mask is None


# ---- texts that would never end -----------------------------------------------------------------------------------


def token(text: str) -> int:
    (token_id,) = json_tokenizer().encode(text).ids
    return token_id


@pytest.mark.parametrize("wanted", [{}, {"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 0}])
@pytest.mark.parametrize("start", ["", "1", "0.", "1e", "-2.5e+"])
def test_a_number_ends_whatever_the_model_prefers(
    wanted: object, start: str, trie: TokenTrie, writer: MaskWriter
) -> None:
    prefix = iter(json_tokenizer().encode(start).ids)

    def choose(allowed: list[int]) -> int:
        for token_id in (next(prefix, -1), token("0"), token("1"), EOS):
            if token_id in allowed:
                return token_id
        raise AssertionError(allowed)

    text = walk(schema(wanted), choose, trie, writer)
    assert sum(map(str.isdigit, text)) <= MAX_DIGITS
    json.loads(text)


def test_digits_in_a_string_are_nobodys_business(trie: TokenTrie, writer: MaskWriter) -> None:
    matcher = begin(schema({"type": "string"}), trie)
    matcher.accept([token('"'), *[token("7")] * 200], trie)
    writer.fill_masks([matcher])
    assert token("7") in allowed_ids(matcher)


def test_a_schema_that_wants_a_longer_number_gets_it(trie: TokenTrie, writer: MaskWriter) -> None:
    long = "7" * 80
    item = f'{{"type": "array", "prefixItems": [{{"enum": [{long}]}}], "minItems": 1, "maxItems": 1}}'
    grammar = Grammar(GrammarKind.JSON_SCHEMA, item)
    digits = walk(grammar, lambda allowed: token("7") if token("7") in allowed else allowed[-1], trie, writer)
    assert float(json.loads(digits)[0]) == pytest.approx(float(long))


def test_white_space_ends_whatever_the_model_prefers(trie: TokenTrie, writer: MaskWriter) -> None:
    otherwise = at_random(1, trie)

    def blank(allowed: list[int]) -> int:
        return token(" ") if token(" ") in allowed else otherwise(allowed)

    text = walk(schema({"type": "array", "items": {"enum": [1]}, "maxItems": 3}), blank, trie, writer)
    assert max(map(len, re.findall(r"\s+", text))) == 8


def between_tags(*values: object) -> Grammar:
    """Schemas in a Lark grammar, among things that only look like schemas."""
    schemas = " ".join(f"%json {json.dumps(value)}" for value in values)
    lines = ["// %json {}", f'start: "<" TAG ">" {schemas} "</%json {{}}>"', "TAG: /%json [{]/"]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def test_a_number_in_a_lark_grammar_ends_whatever_the_model_prefers(trie: TokenTrie, writer: MaskWriter) -> None:
    otherwise = at_random(1, trie)

    def zeros(allowed: list[int]) -> int:
        return token("0") if token("0") in allowed else otherwise(allowed)

    text = walk(between_tags({"type": "array", "items": {"type": "number"}, "maxItems": 2}), zeros, trie, writer)
    assert max(map(len, re.findall(r"\d+", text))) <= MAX_DIGITS
    assert text.startswith("<%json {>[") and text.endswith("]</%json {}>")


def test_white_space_in_a_lark_grammar_ends_whatever_the_model_prefers(trie: TokenTrie, writer: MaskWriter) -> None:
    otherwise = at_random(1, trie)

    def blank(allowed: list[int]) -> int:
        return token(" ") if token(" ") in allowed else otherwise(allowed)

    numbers = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2}
    text = walk(between_tags({}, numbers), blank, trie, writer)
    assert sorted(map(len, re.findall(r"\s+", text)))[-2:] == [8, 8]


def test_a_lark_grammar_that_never_ends_its_strings_is_read_in_one_go(trie: TokenTrie) -> None:
    with pytest.raises(GrammarError):
        compile_grammar(Grammar(GrammarKind.LARK, 'start: "' + '\\"' * 100_000), trie)
