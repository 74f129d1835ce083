"""The reasoning of a row: where it begins and ends, and what ends it when its budget is spent.

    BEFORE ──first token of the start──► INSIDE ──end──► ended: the grammar applies
       └──any other token───────────────────────────────►

No grammar applies inside. The end is found in the text, because it may be spread over several tokens; the start is a
question of what may be chosen first, so it is known by its tokens.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np

from legato.grammar.vocabulary import Bitmask, TokenTrie
from legato.pb import generate_pb2 as pb

NO_BUDGET: Final = sys.maxsize


class RowReasoning:
    """A function of the row's tokens alone: a preempted request continues in the same way."""

    def __init__(self, limits: pb.Reasoning) -> None:
        self._starts = list(limits.start_ids)
        self._ends = [end.encode() for end in limits.ends]
        self._forced = list(limits.forced_ids)
        self.budget = limits.budget if limits.HasField("budget") and self._forced else NO_BUDGET
        self.is_inside = not self._starts
        self.has_ended = False
        self._num_tokens = 0
        self._tail = b""
        # Tokens that have to be chosen next: the rest of the start, or of the end.
        self._next: list[int] = []
        # What may be chosen inside, where a grammar is still to follow: the text must not end before. Known when the
        # row enters.
        self.goes_on: Bitmask | None = None
        self._spend(0)

    @staticmethod
    def of(parameters: pb.NextTokenChooserParameters) -> RowReasoning | None:
        return RowReasoning(parameters.reasoning) if parameters.HasField("reasoning") else None

    @property
    def has_budget(self) -> bool:
        return self.budget != NO_BUDGET

    def accept(self, token_id: int, trie: TokenTrie) -> bool:
        """Whether the token belongs to it. One that does not is the first of the text."""
        if not self.is_inside:
            return self._begin(token_id)
        self._next = self._next[1:] if self._next[:1] == [token_id] else []
        text = self._tail + trie.bytes_of(token_id)
        self._tail = text[-max(map(len, self._ends)) :]
        if any(end in text for end in self._ends):
            self.is_inside, self.has_ended = False, True
        else:
            self._spend(1)
        return True

    def _spend(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self.is_inside and self._num_tokens >= self.budget and not self._next:
            self._next = list(self._forced)

    def _begin(self, token_id: int) -> bool:
        if token_id != self._starts[0]:
            self.has_ended = True
            return False
        self.is_inside, self._next = True, self._starts[1:]
        self._spend(0)
        return True

    def restrict(self, mask: Bitmask | None, *, has_grammar: bool) -> Bitmask | None:
        """What may come next, where `mask` is what the grammar allows if it applies. None: anything."""
        if self.has_ended:
            return mask
        if self.is_inside:
            return self._only(self._next[0]) if self._next else self.goes_on if has_grammar else None
        return None if mask is None else mask | self._only(self._starts[0])

    def _only(self, token_id: int) -> Bitmask:
        assert self.goes_on is not None, "the row has entered"
        only = np.zeros_like(self.goes_on)
        only.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)
        return only
