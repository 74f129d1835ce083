"""JSON that is whole when its tokens are used up.

A text that reaches its limit in the middle of a document is worth nothing to whoever wanted JSON. So a text near its
limit is led to an end: of what the grammar allows, only those tokens remain after which the document can still be
completed in time. There is always one, because that was true of the last token, too.

    tokens left   ─────────────────────────────────────────────────────────────────────────────────► 0
                  not watched            watched                      narrowed             led
                  more is left than      a way to the end is known,   tokens after which   one token
                  any schema part        and how long it is           no way is short      is left:
                  could cost                                          enough are taken out the way's next

Where even the shortest document is too long, nothing is done: the text ends at its limit as any other does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from llguidance import LLMatcher

from legato.grammar.completion.endings import Endings, Place, bits_of, ids_of
from legato.grammar.completion.reach import Reach
from legato.grammar.vocabulary import Bitmask, TokenTrie

# What a harmless token may cost all the same: a string with a minimum length is filled up in fewer or more tokens.
_SLACK: Final = 4
# Tokens that are tried one by one, and those of them for which a new way is sought.
_MOST_TRIED: Final = 1024
_MOST_SOUGHT: Final = 64
# One that is sought in vain takes the time of so many that are found.
_VAIN: Final = 4
_MOST_KNOWN: Final = 12


class Closing:
    """One text. Told of every token, asked after every mask."""

    def __init__(self, endings: Endings, reach: Reach, trie: TokenTrie, tokens_left: int) -> None:
        self._endings, self._reach, self._trie = endings, reach, trie
        self._left = tokens_left
        self._place = Place()
        self._unread: list[int] = []
        self._look_at = tokens_left  # how many tokens are left when it must be looked again whether they suffice
        self._ways: list[list[int]] = []  # to the end from here or from near here; the last one found comes first
        self._costs: dict[int, float] = {}  # how long the way to the end would be after the tokens that were tried here
        self._is_free = False  # whether this is a string that may hold anything, where more text changes no cost
        self._says_the_end = True  # while there is room for the token that does
        self._hopeless = False

    @cached_property
    def _keys(self) -> list[list[int]]:
        """Without the quote before them."""
        return [self._trie.tokenizer.tokenize_str(json.dumps(key)[1:]) for key in self._reach.required]

    def accept(self, token_ids: Sequence[int]) -> None:
        self._left -= len(token_ids)
        self._unread += token_ids

    def narrow(self, position: LLMatcher, mask: Bitmask) -> None:
        """Takes the tokens out of a mask after which the document would not be finished in time."""
        if self._left > self._look_at or self._left < 1 or self._hopeless or position.is_stopped():
            return
        self._read()
        if self._far_from_the_limit():
            return
        way = self._way(position)
        if way is None:
            self._hopeless = True
            return
        allowed = self._within(self._left - 1 - len(way), position, mask)
        if allowed is not None:
            mask &= allowed
            mask |= bits_of(way[:1], len(mask))

    def _read(self) -> None:
        if not (self._is_free and all(map(self._endings.is_content, self._unread))):
            self._costs.clear()
        self._place.feed(self._trie.tokenizer.decode_bytes(self._unread))
        self._unread.clear()

    def _far_from_the_limit(self) -> bool:
        """And when that must be asked again: every token decides so many things, each of which costs so much."""
        decisions, cost = self._endings.most_decisions, self._reach.decision
        spare = self._left - self._reach.whole - (self._place.depth + 1 + decisions) * cost - _SLACK
        if spare > 0:
            self._look_at = self._left - int(spare // (1 + decisions * cost))
        return spare > 0

    def _way(self, position: LLMatcher) -> list[int] | None:
        """From here to the end. Only where there is no other, one without room for the token that says so."""
        way = self._way_of(position, self._left) if self._says_the_end else None
        if way is None:
            self._says_the_end = False
            way = self._way_of(position, self._left + 1)
        if way is not None:
            self._remember(way)
        return way

    def _way_of(self, position: LLMatcher, most: int) -> list[int] | None:
        return (
            self._known_way(position, most)
            or self._endings.way(position, self._place, most - 1, self._keys)
            or self._endings.way(position, self._place, most - 1)
            or self._endings.shortest(position, self._place, most - 1)
        )

    def _known_way(self, position: LLMatcher, most: int) -> list[int] | None:
        """A way that was found elsewhere often fits, or fits but for its first token."""
        for known in self._ways:
            for way in (known, known[1:]):
                if way and len(way) <= most and position.validate_tokens(way) == len(way):
                    return way
        return None

    def _remember(self, way: list[int]) -> None:
        self._ways = [way, *(other for other in self._ways if other != way)][:_MOST_KNOWN]

    def _within(self, spare: int, position: LLMatcher, mask: Bitmask) -> Bitmask | None:
        """The tokens that cost at most `spare` more than the way that is known; None for all of them."""
        self._is_free = False
        if spare < 0:
            return np.zeros_like(mask)
        decisions = int(spare // self._reach.decision)
        if decisions >= self._endings.most_decisions:
            return None
        doubtful = mask & self._endings.deciding[decisions]
        harmless = np.zeros_like(mask) if decisions else doubtful & self._harmless(position, mask)
        token_ids = ids_of(doubtful & ~harmless)[:_MOST_TRIED]
        allowed = ~doubtful | bits_of(self._in_time(token_ids, position), len(mask))
        return allowed | harmless if spare >= _SLACK else allowed

    def _harmless(self, position: LLMatcher, mask: Bitmask) -> Bitmask:
        """White space between values, and text in a string that may hold any."""
        if not self._place.in_string:
            return self._endings.blank
        content = self._endings.content
        self._is_free = np.array_equal(mask & content, content) and all(
            self._is_harmless(i, position) for i in self._endings.sample
        )
        return content if self._is_free else np.zeros_like(mask)

    def _is_harmless(self, token_id: int, position: LLMatcher) -> bool:
        """A pattern, or a second string with another minimum, may want more as soon as there is something."""
        ahead = position.deep_copy()
        return ahead.consume_token(token_id) and self._known_way(ahead, len(self._ways[0]) + _SLACK) is not None

    def _in_time(self, token_ids: Sequence[int], position: LLMatcher) -> list[int]:
        """Those after which the document can be completed with the tokens that are left then."""
        to_seek, nearby = _MOST_SOUGHT, self._ways[0]
        for token_id in token_ids:
            if token_id in self._costs:
                continue
            ahead = position.deep_copy()
            ahead.consume_token(token_id)
            way = [self._endings.eos_token_id] if ahead.is_stopped() else self._known_way(ahead, self._left - 1)
            if way is None and to_seek:
                place = self._place.after(self._trie.bytes_of(token_id))
                way = self._endings.way(ahead, place, self._left - 2, self._keys, nearby)
                to_seek = max(0, to_seek - (1 if way is not None else _VAIN))
                if way is not None:
                    self._remember(way)
            self._costs[token_id] = math.inf if way is None else len(way)
        return [token_id for token_id in token_ids if self._costs[token_id] < self._left]
