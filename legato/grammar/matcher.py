"""The matchers of a batch: the state of each row in its grammar, and the masks of the allowed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from legato.grammar.errors import from_message
from legato.grammar.scanner import MAX_DIGITS, JsonScanner
from legato.grammar.vocabulary import Bitmask, TokenTrie


class Matcher:
    """The matcher of one row. Not thread-safe. After an error the row cannot continue."""

    def __init__(self, compiled: LLMatcher, *, has_json: bool) -> None:
        self.position = compiled.deep_copy()
        self.scanner = JsonScanner()
        self._has_json = has_json
        self.error: str | None = None
        # What may come next; written by `fill_masks`.
        self.mask: Bitmask | None = None

    def accept(self, token_ids: Sequence[int], trie: TokenTrie) -> None:
        """The text goes on with these tokens."""
        for token_id in token_ids:
            if not self.position.consume_token(token_id):
                self.fail(str(from_message(self.position.get_error())))
                return
            if self._has_json:
                self.scanner.feed(trie.bytes_of(token_id))

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, if only one can."""
        return [] if self.error is not None else list(self.position.compute_ff_tokens())

    def fail(self, message: str) -> None:
        self.error = self.error or message

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return self.position.is_stopped()


class MaskWriter:
    """Writes the masks of many texts, on several cores if there are enough of them."""

    def __init__(self, trie: TokenTrie, num_threads: int) -> None:
        self._trie = trie
        # Handing the work to a single other thread would only cost the time that it takes to wake it.
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def fill_masks(self, matchers: Sequence[Matcher]) -> None:
        """`mask` of each, or its `error`. A text for which no token is left has one."""
        running = [matcher for matcher in matchers if matcher.error is None]
        if not running:
            return
        masks = np.empty((len(running), self._trie.num_words), dtype=np.int32)
        self._compute([matcher.position for matcher in running], masks)
        for matcher, mask in zip(running, masks, strict=True):
            self._finish(matcher, mask)

    def _compute(self, positions: list[LLMatcher], masks: NDArray[np.int32]) -> None:
        first, size = masks.ctypes.data, masks.shape[1] * masks.itemsize
        if self._executor is not None and len(positions) > 1:
            lines = [(position, line) for line, position in enumerate(positions)]
            self._executor.unsafe_compute_mask_ptr(lines, first, size, len(masks))
            return
        for line, position in enumerate(positions):
            position.unsafe_compute_mask_ptr(first + line * size, size)

    def _finish(self, matcher: Matcher, mask: Bitmask) -> None:
        # llguidance answers an error with the mask of a text that has ended; a client must not take it for one.
        if matcher.position.is_error():
            matcher.fail(str(from_message(matcher.position.get_error())))
            return
        if matcher.scanner.digits >= MAX_DIGITS:
            without = mask & ~self._trie.number_parts
            if self._trie.any_allowed(without):
                mask[:] = without
        if not self._trie.any_allowed(mask):
            matcher.fail("no token of the model can continue the text as the grammar demands")
            return
        matcher.mask = mask
