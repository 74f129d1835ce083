"""Runs the first steps of a grammar before a request uses it, to find errors and excessive cost early.

Some grammars compile and then fail at the first token, or allow nothing at all. Better that their author hears so at
once than in the middle of an answer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from legato.grammar.compile import compile_grammar
from legato.grammar.errors import GrammarError, from_warning
from legato.grammar.kinds import Grammar
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.vocabulary import Bitmask, TokenTrie

_STEPS: Final = 16


def rehearse(grammar: Grammar, trie: TokenTrie, writer: MaskWriter) -> list[str]:
    """Raises GrammarError, or returns what a lenient reading of the schema leaves out."""
    compiled = compile_grammar(grammar, trie)
    matcher = Matcher(compiled, has_json=grammar.has_json)
    for _ in range(_STEPS):
        writer.fill_masks([matcher])
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        if matcher.is_complete:
            break
        assert matcher.mask is not None
        matcher.accept([_first_byte(_middle(matcher.mask), trie)], trie)
    return sorted({from_warning(warning) for warning in compiled.get_grammar_warnings()})


def _first_byte(token_id: int, trie: TokenTrie) -> int:
    """A token for the first byte alone, which is allowed wherever the whole token is.

    Unless a limit was reached while the mask was computed: then tokens are missing from it, and a text would be led
    where its author never meant it to go. Asked for such a token, llguidance reports the error.
    """
    if trie.tokenizer.is_special_token(token_id):
        return token_id
    alone = trie.tokenizer.tokenize_bytes(trie.bytes_of(token_id)[:1])
    return alone[0] if len(alone) == 1 else token_id


def _middle(mask: Bitmask) -> int:
    """Some token that is allowed. The first ones are single bytes, which lead nowhere interesting."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[len(allowed) // 2])
