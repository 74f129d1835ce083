"""JSON under a limit: whoever chooses the tokens and however few there are, a document that fits is whole."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from legato.grammar.compile import JSON_OPTIONS, compile_grammar
from legato.grammar.completion.closing import Closing
from legato.grammar.completion.endings import Endings, Place
from legato.grammar.completion.reach import Reach, reach_of
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from tests.grammar.schemas import schemas
from tests.grammar.texts import EOS, Choose, allowed_ids, conforms, json_tokenizer, schema, trie_of

TRIE = trie_of(json_tokenizer())
WRITER = MaskWriter(TRIE, num_threads=1)
ENDINGS = Endings(TRIE)
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


def written(grammar: Grammar, limit: int, choose: Choose, *, start: str = "", reach: Reach | None = None) -> list[int]:
    """Tokens under the masks and the limit, the end included where it was reached."""
    matcher = Matcher(compile_grammar(grammar, TRIE), has_json=True)
    bounds = reach or reach_of(grammar)
    assert bounds is not None
    closing, ids = Closing(ENDINGS, bounds, TRIE, limit), list[int]()
    prefix = iter(json_tokenizer().encode(start).ids)
    while len(ids) < limit and EOS not in ids:
        WRITER.fill_masks([matcher])
        assert matcher.mask is not None, matcher.error
        closing.narrow(matcher.position, matcher.mask)
        allowed = [token_id for token_id in allowed_ids(matcher) if token_id < TRIE.vocab_size]
        ids.append(next(prefix, None) or choose(allowed))
        matcher.accept(ids[-1:], TRIE)
        closing.accept(ids[-1:])
    return ids


def text_of(ids: list[int]) -> str:
    return TRIE.tokenizer.decode_bytes([token_id for token_id in ids if token_id != EOS]).decode()


def shortest_len(grammar: Grammar) -> int:
    """Tokens of a short document, without the one that ends it."""
    position = compile_grammar(grammar, TRIE)
    way = ENDINGS.shortest(position, Place(), 300) or ENDINGS.way(position, Place(), 300)
    if way is None:
        raise GrammarError("no short document was found")
    return len(way) - 1


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
def test_a_document_that_fits_is_whole_and_valid_whoever_writes_it(
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
@pytest.mark.parametrize("limit", [48, 49, 60, 90, 200])
def test_a_call_between_markers_is_whole(chooser: Callable[[int], Choose], limit: int) -> None:
    text = json.dumps({**PERSON, "x-guidance": JSON_OPTIONS})
    lark = f'start: one ("\\n" one)*\none: "<call>" call "</call>"\ncall: %json {text}'
    ids = written(Grammar(GrammarKind.LARK, lark), limit, chooser(limit))
    assert ids[-1] == EOS
    for call in text_of(ids).split("</call>")[:-1]:
        assert conforms(json.loads(call.strip().removeprefix("<call>")), PERSON)


def test_a_text_far_from_its_limit_may_go_on_as_before() -> None:
    grammar = schema(PERSON)
    bounds = reach_of(grammar)
    assert bounds is not None
    watched = Matcher(compile_grammar(grammar, TRIE), has_json=True)
    closing, choose = Closing(ENDINGS, bounds, TRIE, 5000), endless(3)
    for _ in range(200):
        WRITER.fill_masks([watched])
        assert watched.mask is not None
        before = watched.mask.copy()
        closing.narrow(watched.position, watched.mask)
        assert (watched.mask == before).all()
        token_id = choose(allowed_ids(watched))
        watched.accept([token_id], TRIE)
        closing.accept([token_id])


def test_far_from_its_limit_nothing_is_looked_at() -> None:
    """Not even the text: a position that cannot answer is never asked."""
    bounds = reach_of(schema(PERSON))
    assert bounds is not None
    closing = Closing(ENDINGS, bounds, TRIE, 100_000)
    WRITER.fill_masks([matcher := Matcher(compile_grammar(schema(PERSON), TRIE), has_json=True)])
    assert matcher.mask is not None
    closing.narrow(matcher.position, matcher.mask)
    closing.accept([5] * 10)
    closing.narrow(None, matcher.mask)  # type: ignore[arg-type]


def test_a_document_that_does_not_fit_is_left_to_its_writer() -> None:
    grammar = schema({"const": "a" * 40})
    matcher = Matcher(compile_grammar(grammar, TRIE), has_json=True)
    bounds = reach_of(grammar)
    assert bounds is not None
    WRITER.fill_masks([matcher])
    assert matcher.mask is not None
    before = matcher.mask.copy()
    Closing(ENDINGS, bounds, TRIE, 5).narrow(matcher.position, matcher.mask)
    assert (matcher.mask == before).all()


def test_both_values_of_an_enum_stay_possible_while_they_fit() -> None:
    said = {text_of(written(schema(PERSON), shortest_len(schema(PERSON)) + 8, at_random(seed))) for seed in range(60)}
    assert {json.loads(text)["unit"] for text in said} == {"celsius", "fahrenheit"}


@settings(max_examples=60, deadline=None)
@given(schemas(), st.sampled_from(CHOOSERS), st.integers(0, 2**32))
def test_a_schema_without_a_bound_is_watched_from_the_beginning(
    wanted: Any, chooser: Callable[[int], Choose], seed: int
) -> None:
    grammar = schema(wanted)
    try:
        least = shortest_len(grammar)
    except GrammarError:
        assume(False)
    ids = written(grammar, least + 12, chooser(seed), reach=Reach(math.inf, math.inf))
    assert conforms(json.loads(text_of(ids), parse_constant=str), wanted)
