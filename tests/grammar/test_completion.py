"""JSON under a token limit: whichever tokens are sampled, a document that fits is complete and valid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from legato.grammar.compile import JSON_OPTIONS, compile_grammar
from legato.grammar.completion import CompletionSearch, JsonCompletion, JsonTokens, completes
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.scanner import JsonScanner
from tests.grammar.schemas import schemas
from tests.grammar.texts import EOS, Choose, allowed_ids, conforms, json_tokenizer, schema, trie_of

TRIE = trie_of(json_tokenizer())
WRITER = MaskWriter(TRIE, num_threads=1)
TOKENS = JsonTokens(TRIE)
BYTES = {token_id: TRIE.bytes_of(token_id) for token_id in range(TRIE.vocab_size)}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "note": {"type": "string"},
    },
    "required": ["name", "tags", "unit"],
    "additionalProperties": False,
}


def written(grammar: Grammar, limit: int, choose: Choose, *, start: str = "", window: int | None = None) -> list[int]:
    """Tokens under the masks and the limit, the end included where it was reached."""
    start_of_text = compile_grammar(grammar, TRIE)
    search, matcher = CompletionSearch(grammar, TOKENS, start_of_text), Matcher(start_of_text, has_json=True)
    search.window = search.window if window is None else window
    completion, ids = JsonCompletion(search, limit, matcher), list[int]()
    prefix = iter(json_tokenizer().encode(start).ids)
    while len(ids) < limit and EOS not in ids:
        WRITER.fill_masks([matcher])
        assert matcher.mask is not None, matcher.error
        completion.narrow(matcher)
        allowed = [token_id for token_id in allowed_ids(matcher) if token_id < TRIE.vocab_size]
        ids.append(next(prefix, None) or choose(allowed))
        matcher.accept(ids[-1:], TRIE)
        completion.accept(ids[-1], matcher)
    return ids


def text_of(ids: list[int]) -> str:
    return TRIE.tokenizer.decode_bytes([token_id for token_id in ids if token_id != EOS]).decode()


def shortest(grammar: Grammar) -> list[int]:
    """Tokens of a short document, without the one that ends it."""
    position = compile_grammar(grammar, TRIE)
    search = CompletionSearch(grammar, TOKENS, position)
    found = search.search(position, JsonScanner(), 300, (), greedy=False) or search.find(position, JsonScanner(), 300)
    if found is None:
        raise GrammarError("no short document was found")
    return found[:-1]


def shortest_len(grammar: Grammar) -> int:
    return len(shortest(grammar))


# ---- those who choose -----------------------------------------------------------------------------------------------


def at_random(seed: int) -> Choose:
    return random.Random(seed).choice


def longest(seed: int) -> Choose:
    return lambda allowed: max(allowed, key=lambda token_id: (len(BYTES[token_id]), token_id))


def opening(seed: int) -> Choose:
    """Begins whatever can be begun."""
    rng = random.Random(seed)
    marks = {token_id for token_id, data in BYTES.items() if data.strip(b" ") and not data.strip(b'{[",: ')}
    return lambda allowed: rng.choice([i for i in allowed if i in marks] or [i for i in allowed if i != EOS] or allowed)


def endless(seed: int) -> Choose:
    """Closes nothing that need not be closed."""
    rng = random.Random(seed)
    return lambda allowed: rng.choice([i for i in allowed if i != EOS and not set(BYTES[i]) & set(b"}]")] or allowed)


def escaping(seed: int) -> Choose:
    """Leaves escapes and characters unfinished."""
    rng = random.Random(seed)
    parts = {
        i
        for i, data in BYTES.items()
        if data.startswith(b"\\") or data in (b"u", b"d", b"8", b"D") or data[:1] > b"\x7f"
    }
    return lambda allowed: rng.choice([i for i in allowed if i in parts] or [i for i in allowed if i != EOS] or allowed)


CHOOSERS = (at_random, longest, opening, endless, escaping)


@settings(max_examples=400, deadline=None)
@given(schemas(), st.sampled_from(CHOOSERS), st.integers(0, 2**32), st.sampled_from([0, 1, 2, 3, 5, 9, 20, 60]))
def test_a_document_that_fits_is_complete_and_valid(
    wanted: Any, chooser: Callable[[int], Choose], seed: int, more: int
) -> None:
    grammar = schema(wanted)
    try:
        least = shortest_len(grammar)
    except GrammarError:
        assume(False)
    ids = written(grammar, max(1, least + more), chooser(seed))
    text = text_of(ids)
    assert conforms(json.loads(text, parse_constant=str), wanted), text
    assert EOS in ids or more == 0, "a text that has room for it says that it has ended"


@pytest.mark.parametrize("short", [{"pattern": "^[A-Z][a-z]*$"}, {"maxLength": 2}])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_short_string_does_not_become_a_long_one(chooser: Callable[[int], Choose], short: dict[str, Any]) -> None:
    """A letter that may begin it may not go on with it: what it costs there is another matter."""
    wanted = {"anyOf": [{"type": "string", **short}, {"type": "string", "minLength": 20}]}
    grammar = schema(wanted)
    for seed in range(20):
        text = text_of(written(grammar, shortest_len(grammar) + 2, chooser(seed)))
        assert conforms(json.loads(text), wanted), text


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_any_object_closes_at_any_limit(chooser: Callable[[int], Choose], limit: int) -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    ids = written(grammar, limit, chooser(limit))
    assert limit < shortest_len(grammar) or isinstance(json.loads(text_of(ids)), dict)


@pytest.mark.parametrize("start", ['{"name": "\\', '{"name": "\\u', '{"name": "\\u00', '{"name": "a\\\\'])
def test_a_half_written_escape_is_finished_first(start: str) -> None:
    used = len(json_tokenizer().encode(start).ids)
    ids = written(schema(PERSON), used + 60, endless(1), start=start)
    assert conforms(json.loads(text_of(ids)), PERSON)


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("limit", [48, 49, 60, 75, 90, 120, 200])
def test_a_call_between_markers_is_whole(chooser: Callable[[int], Choose], limit: int) -> None:
    text = json.dumps({**PERSON, "x-guidance": JSON_OPTIONS})
    lark = f'start: one ("\\n" one)*\none: "<call>" call "</call>"\ncall: %json {text}'
    ids = written(Grammar(GrammarKind.LARK, lark), limit, chooser(limit))
    assert ids[-1] == EOS
    for call in text_of(ids).split("</call>")[:-1]:
        assert conforms(json.loads(call.strip().removeprefix("<call>")), PERSON)


def begun(grammar: Grammar, limit: int) -> tuple[Matcher, JsonCompletion]:
    matcher = Matcher(compile_grammar(grammar, TRIE), has_json=True)
    return matcher, JsonCompletion(CompletionSearch(grammar, TOKENS, matcher.position), limit, matcher)


def test_a_text_far_from_its_limit_is_left_alone() -> None:
    matcher, completion = begun(schema(PERSON), 5000)
    choose = endless(3)
    for _ in range(200):
        WRITER.fill_masks([matcher])
        assert matcher.mask is not None
        before = matcher.mask.copy()
        completion.narrow(matcher)
        assert (matcher.mask == before).all()
        token_id = choose(allowed_ids(matcher))
        matcher.accept([token_id], TRIE)
        completion.accept(token_id, matcher)


def test_far_from_its_limit_nothing_is_looked_at() -> None:
    """Not even the text: a matcher that cannot answer is never asked."""
    _, completion = begun(schema(PERSON), 100_000)
    for _ in range(10):
        completion.accept(5, None)  # type: ignore[arg-type]
        completion.narrow(None)  # type: ignore[arg-type]


def test_a_document_that_does_not_fit_is_cut_off_like_any_text() -> None:
    matcher, completion = begun(schema({"const": "a" * 40}), 5)
    WRITER.fill_masks([matcher])
    assert matcher.mask is not None
    before = matcher.mask.copy()
    completion.narrow(matcher)
    assert (matcher.mask == before).all()


def test_both_values_of_an_enum_stay_possible_while_they_fit() -> None:
    said = {text_of(written(schema(PERSON), shortest_len(schema(PERSON)) + 8, at_random(seed))) for seed in range(60)}
    assert {json.loads(text)["unit"] for text in said} == {"celsius", "fahrenheit"}


@settings(max_examples=60, deadline=None)
@given(schemas(), st.sampled_from(CHOOSERS), st.integers(0, 2**32))
def test_a_text_that_is_watched_from_its_beginning_is_whole(
    wanted: Any, chooser: Callable[[int], Choose], seed: int
) -> None:
    grammar = schema(wanted)
    try:
        least = shortest_len(grammar)
    except GrammarError:
        assume(False)
    ids = written(grammar, least + 12, chooser(seed), window=10**9)
    assert conforms(json.loads(text_of(ids), parse_constant=str), wanted)


# ---- what a search finds --------------------------------------------------------------------------------------------

LONG_NAMED = {"a": {"type": "string"}, "a_long_property_name": {"type": "string"}}
NESTED = {"name": {"type": "object", "properties": {"name": {}}, "required": ["name"]}}
TWO_TRUE = {"type": "array", "items": {"enum": [True]}, "minItems": 2}
STRINGS = {"a": {"type": "string"}, "b": {"type": "string"}}


@pytest.mark.parametrize(
    ("properties", "required", "text"),
    [
        ({"name": {}, "é": {"type": "string"}}, "é", '{"é":""}'),
        (LONG_NAMED, "a_long_property_name", '{"a_long_property_name":""}'),
        ({**NESTED, "age": TWO_TRUE}, "age", '{"age":[true,true]}'),
        ({"ab": {}, 'q"t': {"minLength": 3}, **STRINGS}, "b", '{"b":""}'),
    ],
    ids=["as many tokens", "begins like another", "after an object", "after others"],
)
def test_the_required_key_is_found_among_optional_ones(properties: Any, required: str, text: str) -> None:
    wanted = {"type": "object", "properties": properties, "required": [required]}
    assert text_of(shortest(schema(wanted))) == text


def test_long_values_do_not_hide_as_many_short_ones() -> None:
    values = {"age": {"enum": ['n\u00e9"x\\', "ab"]}, "name": {"type": "boolean"}}
    item = {"type": "object", "properties": values, "required": ["age"]}
    text = text_of(shortest(schema({"type": "array", "items": item, "minItems": 5})))
    assert text == json.dumps(5 * [{"age": "ab"}], separators=(",", ":"))


RECORD = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string"} for i in range(12)},
    "required": [f"field_{i}" for i in range(12)],
}


@pytest.mark.parametrize("limit", range(60, 400, 20))
def test_an_item_is_begun_only_if_it_can_be_finished(limit: int) -> None:
    """Each costs some seventy tokens at once."""
    wanted = {"type": "array", "items": RECORD}
    assert conforms(json.loads(text_of(written(schema(wanted), limit, opening(limit)))), wanted)


@pytest.mark.parametrize("around", ["start: /.*/ call", 'start: call\n%ignore " "', "start: call\nW: /a+/"])
def test_json_among_other_text_is_not_completed(around: str) -> None:
    assert not completes(Grammar(GrammarKind.LARK, around + '\ncall: %json {"type": "object"}'))


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.LARK])
def test_only_json_is_completed(kind: GrammarKind) -> None:
    assert not completes(Grammar(kind, '["a"]'))
