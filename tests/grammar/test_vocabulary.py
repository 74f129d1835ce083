from __future__ import annotations

import pytest

from legato.grammar.kinds import Grammar
from legato.grammar.matcher import MaskWriter
from legato.grammar.numbers import MAX_DIGITS
from tests.grammar.texts import EOS, json_tokenizer, schema, trie_of, walk

_NUMBER: Grammar = schema({"type": "number"})


@pytest.mark.parametrize("vocab_size", [447, 448, 449, 479, 480, 481])
def test_masks_have_the_same_words_whatever_the_size_of_the_vocabulary(vocab_size: int) -> None:
    trie = trie_of(json_tokenizer(), vocab_size)
    assert len(trie.number_parts) == trie.num_words


def test_a_number_ends_in_a_vocabulary_of_whole_words() -> None:
    trie = trie_of(json_tokenizer(), 448)
    (zero,), (one,) = (json_tokenizer().encode(digit).ids for digit in "01")

    def stubborn(allowed: list[int]) -> int:
        return next(token_id for token_id in (zero, one, EOS) if token_id in allowed)

    text = walk(_NUMBER, lambda allowed: one if one in allowed else stubborn(allowed), trie, MaskWriter(trie, 1))
    assert text == "1" * MAX_DIGITS
