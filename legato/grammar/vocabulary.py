"""The tokens of a model as llguidance sees them: bytes in a trie. Built once per program, in a fraction of a second."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from legato.grammar.errors import GrammarError

# One bit per token, 32 to a word, lowest bit first.
Bitmask = NDArray[np.int32]


class TokenTrie:
    """`vocab_size` is the model's: it may have more rows than its tokenizer has tokens, and rarely fewer."""

    def __init__(self, tokenizer_json: str, tokenizer_size: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """From `Tokenizer.to_str()` and `get_vocab_size()`. GrammarError where the tokenizer is of no known kind."""
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so constrained output could not end")
        try:
            self.tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=max(vocab_size, tokenizer_size), eos_token=list(eos_token_ids)
            )
        except BaseException as error:  # a panic inside the library is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise GrammarError(f"the model's tokenizer cannot be used with grammars: {error}") from None
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @property
    def num_words(self) -> int:
        """Words of a mask as llguidance writes it."""
        return -(-self.tokenizer.vocab_size // 32)

    def bytes_of(self, token_id: int) -> bytes:
        return self.tokenizer.decode_bytes([token_id])

    def any_allowed(self, mask: Bitmask) -> bool:
        """Whether the model has one of the tokens that a mask allows."""
        full, rest = divmod(self.vocab_size, 32)
        return bool(mask[:full].any() or (rest and int(mask[full]) & ((1 << rest) - 1)))

    @cached_property
    def all_but_ends(self) -> Bitmask:
        """Every token that does not end the text."""
        flags = np.ones(self.num_words * 32, dtype=np.uint8)
        flags[self._eos_token_ids] = 0
        return np.packbits(flags, bitorder="little").view(np.int32)

    @cached_property
    def number_parts(self) -> Bitmask:
        """The tokens with which a JSON number that has a digit can go on: asked of llguidance itself."""
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_regex(r"[0-9.eE](?s:.*)"), log_level=0)
        # Asked this way, llguidance answers with room for one more token than there are: perhaps with one more word.
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: self.num_words]
