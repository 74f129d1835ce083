from __future__ import annotations

import pytest
from llguidance import LLTokenizer

from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter
from legato.grammar.scanner import MAX_DIGITS
from legato.server.grammars import WORDS
from tests.grammar.texts import EOS, allowed_ids, at_random, begin, json_tokenizer, schema, trie_of, walk

_NUMBER: Grammar = schema({"type": "number"})


@pytest.mark.parametrize("vocab_size", [447, 448, 449, 479, 480, 481])
def test_masks_have_the_same_words_whatever_the_size_of_the_vocabulary(vocab_size: int) -> None:
    trie = trie_of(json_tokenizer(), vocab_size)
    assert len(trie.number_parts) == trie.num_words


def test_a_number_ends_in_a_vocabulary_of_whole_words() -> None:
    trie = trie_of(json_tokenizer(), 448)
    (zero,), (one,) = (json_tokenizer().encode(digit).ids for digit in "01")

    def last_allowed(allowed: list[int]) -> int:
        return next(token_id for token_id in (zero, one, EOS) if token_id in allowed)

    text = walk(_NUMBER, lambda allowed: one if one in allowed else last_allowed(allowed), trie, MaskWriter(trie, 1))
    assert text == "1" * MAX_DIGITS


@pytest.mark.parametrize(
    "regex", ["[a-zA-Z ,.]{40,60}", "([a-z]+ ?){3,9}!", "[^x]{20}", "(the|quick|lazy) [A-Z ]{1,20}"]
)
def test_words_as_one_part_of_the_vocabulary_change_no_mask(regex: str) -> None:
    plain, sliced = trie_of(json_tokenizer()), trie_of(json_tokenizer())
    sliced.tokenizer = sliced.tokenizer.with_slices([*LLTokenizer.general_slices(), WORDS])
    grammar = Grammar(GrammarKind.REGEX, regex)
    for seed in range(8):
        matchers, choose = [begin(grammar, trie) for trie in (plain, sliced)], at_random(seed, plain)
        for _ in range(40):
            for matcher, trie in zip(matchers, (plain, sliced), strict=True):
                MaskWriter(trie, 1).fill_masks([matcher])
            allowed, same = map(allowed_ids, matchers)
            assert allowed == same
            token_id = choose(allowed)
            for matcher, trie in zip(matchers, (plain, sliced), strict=True):
                matcher.accept([token_id], trie)
            if token_id == EOS:
                break
