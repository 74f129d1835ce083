"""Grammars of rows: masks are there when a step needs them, and a row that fails, fails alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.vocabulary import TokenTrie
from legato.server import grammars as module
from legato.server.grammars import Grammars, RowGrammar
from tests.grammar.texts import EOS, json_tokenizer, schema

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{2}")
LETTER = Grammar(GrammarKind.REGEX, "a")
# Seconds until a test that waits in vain gives up, and seconds that a mask may take where one never comes: within them
# a thread that has work gets a core, also on a busy machine.
PATIENCE, MASK_SECONDS = 60.0, 0.5


@pytest.fixture
def grammars(trie: TokenTrie) -> Iterator[Grammars]:
    grammars = Grammars(lambda: trie)
    yield grammars
    grammars.close()


def token(text: str) -> int:
    (token_id,) = json_tokenizer().encode(text).ids
    return token_id


def allowed(grammars: Grammars, rows: list[int]) -> dict[int, list[int]]:
    """Place -> token ids, for the rows that are restricted."""
    found = grammars.allowed(rows)
    if found is None:
        return {}
    lines = np.unpackbits(found.bits.numpy().view(np.uint8), axis=1, bitorder="little")
    return {place: np.flatnonzero(line).tolist() for place, line in zip(found.places, lines, strict=True)}


def accept(grammars: Grammars, rows: list[int], *texts: str) -> None:
    ids = [token(text) for text in texts]
    grammars.accept(rows, lambda: ids)


def test_rows_follow_their_own_grammars_from_token_to_token(grammars: Grammars) -> None:
    grammars.set_row(3, DIGITS, [])
    grammars.set_row(5, LETTER, [])
    assert {place: sorted(ids)[:1] for place, ids in allowed(grammars, [5, 4, 3]).items()} == {
        0: [token("a")],
        2: [token("0")],
    }
    accept(grammars, [5, 4, 3], "a", "x", "7")
    masks = allowed(grammars, [5, 4, 3])
    assert masks[0] == [EOS]
    assert token("1") in masks[2] and EOS not in masks[2]


def test_a_batch_without_grammars_is_not_restricted(grammars: Grammars) -> None:
    grammars.set_row(1, DIGITS, [])
    assert grammars.active([0, 1]) and not grammars.active([0, 2])
    assert grammars.allowed([0, 2]) is None
    assert grammars.errors([0, 2]) == {}


def test_a_preempted_request_comes_back_to_where_it_was(grammars: Grammars) -> None:
    grammars.set_row(0, DIGITS, [token("4")])
    assert EOS not in allowed(grammars, [0])[0]
    grammars.set_row(1, DIGITS, [token("4"), token("2")])
    assert allowed(grammars, [1]) == {0: [EOS]}


def test_a_row_forgets_the_grammar_of_the_request_before(grammars: Grammars) -> None:
    grammars.set_row(0, LETTER, [])
    grammars.set_row(0, DIGITS, [])
    assert token("a") not in allowed(grammars, [0])[0]
    grammars.set_row(0, None, [])
    assert not grammars.active([0])


def test_a_token_on_its_way_for_the_request_before_does_not_reach_the_next_one(grammars: Grammars) -> None:
    """Run-ahead: a row is given to somebody else while a step of its former owner is still being computed."""
    arrived = threading.Event()
    grammars.set_row(0, DIGITS, [])
    allowed(grammars, [0])

    def late() -> list[int]:
        arrived.wait(PATIENCE)
        return [token("1")]

    grammars.accept([0], late)
    grammars.set_row(0, LETTER, [])
    arrived.set()
    assert allowed(grammars, [0]) == {0: [token("a")]}


def test_accepting_does_not_wait_for_the_tokens_but_the_next_mask_does(grammars: Grammars) -> None:
    grammars.set_row(0, DIGITS, [])
    allowed(grammars, [0])
    on_host = threading.Event()

    was_read = threading.Event()

    def read() -> list[int]:
        assert on_host.wait(PATIENCE)
        was_read.set()
        return [token("8")]

    grammars.accept([0], read)
    assert not was_read.is_set()
    threading.Timer(0.05, on_host.set).start()
    assert EOS not in allowed(grammars, [0])[0]
    assert was_read.is_set()


def test_a_grammar_that_does_not_compile_fails_its_row_alone(grammars: Grammars) -> None:
    grammars.set_row(0, schema({"uniqueItems": True}), [])
    grammars.set_row(1, LETTER, [])
    assert allowed(grammars, [0, 1]) == {1: [token("a")]}
    (failed,) = grammars.errors([0, 1]).items()
    assert failed[0] == 0 and "`uniqueItems`" in failed[1]


def test_tokens_that_contradict_the_grammar_fail_their_row_alone(grammars: Grammars) -> None:
    for row in (0, 1):
        grammars.set_row(row, DIGITS, [])
    allowed(grammars, [0, 1])
    accept(grammars, [0, 1], "a", "1")
    assert list(allowed(grammars, [0, 1])) == [1]
    assert list(grammars.errors([0, 1])) == [0]
    accept(grammars, [0, 1], "a", "1")  # the router has not heard of it yet
    assert allowed(grammars, [0, 1]) == {1: [EOS]}
    assert list(grammars.errors([0, 1])) == [0]


def test_a_device_that_fails_fails_the_rows_of_its_step(grammars: Grammars) -> None:
    grammars.set_row(0, DIGITS, [])
    allowed(grammars, [0])

    def read() -> list[int]:
        raise RuntimeError("out of memory")

    grammars.accept([0], read)
    assert allowed(grammars, [0]) == {}
    assert "out of memory" in grammars.errors([0])[0]
    grammars.set_row(0, DIGITS, [])
    assert allowed(grammars, [0])[0], "the next request in that row is not concerned"


def test_a_mask_that_never_comes_fails_its_row_and_the_others_go_on(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.1)
    monkeypatch.setattr(module, "_MASK_SECONDS", MASK_SECONDS)
    for row in (0, 1):
        grammars.set_row(row, DIGITS, [])
    allowed(grammars, [0, 1])
    hanging = threading.Event()
    grammars.accept([0], lambda: [int(hanging.wait(PATIENCE))])
    assert allowed(grammars, [0]) == {}
    assert "too long" in grammars.errors([0])[0]
    accept(grammars, [1], "1")
    assert EOS not in allowed(grammars, [1])[0]
    hanging.set()


def test_a_row_that_hangs_costs_neither_those_beside_it_nor_those_that_follow(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completing JSON is the one thing that is done row by row."""
    monkeypatch.setattr(module, "_MASK_SECONDS", MASK_SECONDS)
    for row in (0, 1):
        grammars.set_row(row, NAMED, [], max_new_tokens=0 if row else LIMIT)
    allowed(grammars, [0, 1])
    hanging = threading.Event()
    monkeypatch.setattr(module.JsonCompletion, "narrow", lambda self, matcher: hanging.wait(PATIENCE))
    for text in ("{", '"'):
        accept(grammars, [0, 1], text, text)
        assert list(allowed(grammars, [0, 1])) == [1]
    assert "took too long" in grammars.errors([0, 1])[0]
    hanging.set()


def test_rows_that_enter_together_wait_their_turn(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MASK_SECONDS", MASK_SECONDS)
    grammars.prepare(LETTER).result()
    monkeypatch.setattr(Grammars, "_follow", lambda self, state, token_id: time.sleep(0.2 * MASK_SECONDS))
    for row in range(10):
        grammars.set_row(row, LETTER, [token("a")])
    assert len(allowed(grammars, list(range(10)))) == 10


def test_a_preempted_request_needs_one_mask_and_not_those_of_its_text(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    fill_masks = module.MaskWriter.fill_masks

    def counted(self: MaskWriter, matchers: list[Matcher]) -> None:
        computed.append(len(matchers))
        fill_masks(self, matchers)

    monkeypatch.setattr(module.MaskWriter, "fill_masks", counted)
    ids = json_tokenizer().encode('{"name": "' + "a b c " * 100).ids
    grammars.set_row(0, NAMED, ids, max_new_tokens=len(ids) + LIMIT)
    assert token('"') in allowed(grammars, [0])[0]
    assert computed == [1]


def test_rows_that_run_do_not_wait_for_one_that_follows_its_text(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.set_row(0, DIGITS, [])
    allowed(grammars, [0])
    following, following_ended = threading.Event(), threading.Event()
    follow = Grammars._follow

    def slow(self: Grammars, state: RowGrammar, token_id: int) -> None:
        if state.grammar == LETTER:
            following.set()
            following_ended.wait(PATIENCE)
        follow(self, state, token_id)

    monkeypatch.setattr(Grammars, "_follow", slow)
    grammars.set_row(1, LETTER, [token("a")])
    assert following.wait(PATIENCE)
    accept(grammars, [0], "1")
    assert EOS not in allowed(grammars, [0])[0]
    following_ended.set()
    assert allowed(grammars, [1]) == {0: [EOS]}


def test_a_grammar_prepared_ahead_is_not_compiled_again(trie: TokenTrie, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    compile_grammar = module.compile_grammar
    monkeypatch.setattr(module, "compile_grammar", lambda g, t: (compiled.append(g), compile_grammar(g, t))[1])
    grammars = Grammars(lambda: trie)
    grammars.prepare(DIGITS).result()
    for row in range(3):
        grammars.set_row(row, DIGITS, [])
    assert len(allowed(grammars, [0, 1, 2])) == 3
    assert compiled == [DIGITS]
    grammars.close()


def test_the_grammars_used_least_recently_are_forgotten(grammars: Grammars) -> None:
    popular = grammars.prepare(DIGITS)
    for i in range(module._KEPT + 5):
        grammars.prepare(Grammar(GrammarKind.REGEX, f"x{i}")).result()
        assert grammars.prepare(DIGITS) is popular
    assert len(grammars._compiled) == module._KEPT


def test_preparing_says_what_is_wrong(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        grammars.prepare(Grammar(GrammarKind.REGEX, "(")).result()


def test_a_slow_compilation_does_not_keep_rows_with_masks_waiting(
    trie: TokenTrie, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar, compiling = module.compile_grammar, threading.Event()

    def slow(grammar: Grammar, trie: TokenTrie) -> object:
        if grammar == LETTER:
            compiling.wait(PATIENCE)
        return compile_grammar(grammar, trie)

    monkeypatch.setattr(module, "compile_grammar", slow)
    grammars = Grammars(lambda: trie)
    grammars.set_row(0, DIGITS, [])
    allowed(grammars, [0])
    grammars.set_row(1, LETTER, [])  # its prompt takes several steps
    accept(grammars, [0], "1")
    assert EOS not in allowed(grammars, [0])[0]
    compiling.set()
    assert allowed(grammars, [1]) == {0: [token("a")]}
    grammars.close()


# ---- JSON with a limit --------------------------------------------------------------------------------------------

NAMED = schema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
LIMIT = 20


def wordy(ids: list[int]) -> int:
    """The longest token that is allowed: nothing ends by itself."""
    return max(ids, key=lambda token_id: (len(json_tokenizer().decode([token_id])), token_id))


def test_json_is_finished_before_its_limit(grammars: Grammars) -> None:
    grammars.set_row(0, NAMED, [], max_new_tokens=LIMIT)
    written: list[int] = []
    while EOS not in written and len(written) < LIMIT:
        written.append(wordy(allowed(grammars, [0])[0]))
        grammars.accept([0], lambda: written[-1:])
    assert written[-1] == EOS
    assert json.loads(json_tokenizer().decode(written, skip_special_tokens=True))["name"]


def test_json_without_a_limit_goes_on(grammars: Grammars) -> None:
    grammars.set_row(0, NAMED, [])
    for _ in range(3 * LIMIT):
        ids = [wordy(allowed(grammars, [0])[0])]
        assert EOS not in ids
        grammars.accept([0], lambda ids=ids: ids)  # type: ignore[misc]


def test_json_that_was_preempted_is_led_to_the_same_end(grammars: Grammars) -> None:
    grammars.set_row(0, NAMED, [], max_new_tokens=LIMIT)
    written: list[int] = []
    while EOS not in written:
        grammars.set_row(1, NAMED, written, max_new_tokens=LIMIT)
        masks = allowed(grammars, [0, 1])
        assert masks[0] == masks[1]
        written.append(wordy(masks[0]))
        grammars.accept([0], lambda: written[-1:])
