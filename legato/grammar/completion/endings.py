"""Ways to the end of a JSON text: the tokens that close what is open, from wherever a text stands.

Nobody tells how a grammar goes on, but a copy of a position can be asked what it would accept, in less than a
microsecond. So a way is found by trying, the tokens that close most first. What it finds is a way, if not always the
shortest; where that one is too long for a text, `shortest` looks at more of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np
from llguidance import LLMatcher

from legato.grammar.compile import compile_grammar
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.vocabulary import Bitmask, TokenTrie

_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")
_STRUCTURE: Final = frozenset(b'{}[]",:')
# Behind each of these there is one key or value less to be written.
_PASSED: Final = frozenset(b"}],:")
# Positions that a search looks at: some ten milliseconds.
_PATIENCE: Final = 600
# Positions that are as far, as deep and as free to go on as each other, of which it looks at no more: what may follow
# at once does not tell everything that will.
_ALIKE: Final = 3
# Tokens after which a way has met another one, if it does.
_SOON: Final = 8
# Tokens that stand for all others, short ones and long ones.
_SAMPLE: Final = 16
# Tokens of a narrow string that a search goes into.
_BREADTH: Final = 48
# To be tried in this order outside of a string, once nothing can be closed. A digit comes after what may follow a
# number, which would else never end.
_GOING_ON: Final = (
    *(',"', ",", ":", '""', "[]", "{}", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
    *('"', "null", "true", "false", "n", "t", "f", "-", "{", "[", ".", "e"),
)
_FILLING: Final = ("0", "1", "a", "A", "e", "-", ".", "@", ":", "/", "n", "u")


@dataclass(slots=True)
class Place:
    """Where a JSON text stands, as far as quotes and brackets tell."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def feed(self, data: bytes) -> None:
        if self.in_string and not self.escaped and _QUOTE not in data and _BACKSLASH not in data:
            return
        for byte in data:
            if self.escaped:
                self.escaped = False
            elif byte == _QUOTE:
                self.in_string = not self.in_string
            elif self.in_string:
                self.escaped = byte == _BACKSLASH
            else:
                self.depth += (byte in _OPENING) - (byte in _CLOSING)

    def after(self, data: bytes) -> Place:
        place = replace(self)
        place.feed(data)
        return place


class Endings:
    """What the tokens of a model can do to a JSON text. Made once, in a fraction of a second."""

    def __init__(self, trie: TokenTrie) -> None:
        self._trie = trie
        self.eos_token_id = trie.tokenizer.eos_token
        tokens = {i: trie.bytes_of(i) for i in range(trie.vocab_size) if not _is_special(trie, i)}
        structure = {i: sum(map(_STRUCTURE.__contains__, data)) for i, data in tokens.items()}
        self.most_decisions = 1 + max(structure.values(), default=0)
        # By number: the tokens that may decide more things than that, one between every two marks of structure.
        self.deciding = [
            bits_of([i for i, number in structure.items() if number >= least], trie.num_words)
            for least in range(self.most_decisions)
        ]
        # What leaves a string that may hold anything as it was, but for a character that lacks some bytes.
        self.content = bits_of(
            [i for i, d in tokens.items() if _QUOTE not in d and _BACKSLASH not in d], trie.num_words
        )
        self.content &= _anything(trie)
        self.sample = sorted(ids_of(self.content), key=lambda i: len(tokens[i]))[:: 1 + len(tokens) // _SAMPLE]
        self.blank = bits_of([i for i, data in tokens.items() if data and not data.strip(b" \t\r\n")], trie.num_words)
        ends = {i: data for i, data in tokens.items() if data and not data.strip(b'"]}:')}
        self._ends_of_strings = _longest_first(
            {i: d for i, d in ends.items() if d[0] == _QUOTE and _QUOTE not in d[1:]}
        )
        self._ends_of_values = _longest_first({i: data for i, data in ends.items() if not data.strip(b"]}")})
        by_text = {data: i for i, data in sorted(tokens.items(), reverse=True)}
        self._going_on = [by_text[text.encode()] for text in _GOING_ON if text.encode() in by_text]
        self._end_of_key = trie.tokenizer.tokenize_bytes(b'":')
        blanks = _longest_first({i: data for i, data in tokens.items() if data and not data.strip(b" ")})
        self._filling = blanks + [by_text[text.encode()] for text in _FILLING if text.encode() in by_text]

    def is_content(self, token_id: int) -> bool:
        return bool(self.content[token_id // 32] >> token_id % 32 & 1)

    def way(
        self,
        position: LLMatcher,
        place: Place,
        most: int,
        keys: Sequence[list[int]] = (),
        nearby: Sequence[int] = (),
    ) -> list[int] | None:
        """Tokens that end the text, the end-of-sequence token included; None for more than `most` before that one.

        `keys` are those that objects must have, `nearby` is such a way from somewhere else, on which this may end.
        """
        position, place, found = position.deep_copy(), replace(place), list[int]()
        while not position.is_accepting():
            if len(found) < _SOON and (rest := _rest(position, nearby, most + 1 - len(found))):
                return found + rest
            tokens = self._forced(position) or self._step(position, place, keys)
            if not tokens or len(found) + len(tokens) > most or not position.consume_tokens(tokens):
                return None
            place.feed(self._trie.tokenizer.decode_bytes(tokens))
            found += tokens
        return [*found, self.eos_token_id]

    def shortest(self, position: LLMatcher, place: Place, most: int) -> list[int] | None:
        """Like `way`, for when that finds none: all ways at once, the shortest first, as far as patience goes. Of ways
        as long as each other, those first that have more behind them."""
        order = count()
        waiting = [(0, 0, next(order), position, place, list[int]())]
        seen: Counter[tuple[int, int, bytes]] = Counter()
        for _ in range(_PATIENCE):
            if not waiting:
                return None
            length, behind, _, position, place, found = heapq.heappop(waiting)
            if position.is_accepting():
                return [*found, self.eos_token_id]
            mark = (length, place.depth, position.compute_bitmask())
            if seen[mark] == _ALIKE:
                continue
            seen[mark] += 1
            for tokens in self._options(position, place):
                ahead = position.deep_copy()
                if length + len(tokens) <= most and ahead.consume_tokens(tokens):
                    text = self._trie.tokenizer.decode_bytes(tokens)
                    passed = behind - sum(map(_PASSED.__contains__, text))
                    there = (length + len(tokens), passed, next(order), ahead, place.after(text), found + tokens)
                    heapq.heappush(waiting, there)
        return None

    def _forced(self, position: LLMatcher) -> list[int]:
        if tokens := position.compute_ff_tokens():
            return tokens
        if text := position.compute_ff_bytes():
            tokens = self._trie.tokenizer.tokenize_bytes(text)
            if position.validate_tokens(tokens) == len(tokens):
                return tokens
        return []

    def _step(self, position: LLMatcher, place: Place, keys: Sequence[list[int]]) -> list[int]:
        if tokens := next(self._ends(position, place), None):
            return tokens
        if place.in_string:  # perhaps at the beginning of a key: it had better be one that is missing
            for key in keys:
                if position.validate_tokens(key) == len(key):
                    return key
        return next(self._others(position, place), [])

    def _options(self, position: LLMatcher, place: Place) -> list[list[int]]:
        """What a search tries next. Whatever can be closed is closed: no way gets shorter by what is put in before. But
        a key may be the beginning of another one, and that the one that is missing."""
        if forced := self._forced(position):
            return [forced]
        ends = [*self._ends(position, place)]
        if ends and place.in_string and position.validate_tokens(self._end_of_key) == len(self._end_of_key):
            mask = np.frombuffer(position.compute_bitmask(), dtype=np.int32)
            if np.count_nonzero(mask) <= _BREADTH:
                ends += _each_of(mask)
        options = ends or self._others(position, place)
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, options))]

    def _ends(self, position: LLMatcher, place: Place) -> Iterator[list[int]]:
        """What closes something, as much as possible first."""
        if not place.escaped:
            for token_id in self._ends_of_strings if place.in_string else self._ends_of_values:
                if position.validate_tokens([token_id]):
                    yield [token_id]

    def _others(self, position: LLMatcher, place: Place) -> Iterator[list[int]]:
        """What leads to something that can be closed."""
        for token_id in self._filling if place.in_string else self._going_on:
            if position.validate_tokens([token_id]):
                yield [token_id]
        if place.in_string:  # one that may not hold just anything
            yield from _each_of(np.frombuffer(position.compute_bitmask(), dtype=np.int32))


def _each_of(mask: Bitmask) -> list[list[int]]:
    return [[token_id] for token_id in ids_of(mask)[:_BREADTH]]


def _rest(position: LLMatcher, way: Sequence[int], most: int) -> list[int] | None:
    """The part of a way that leads from here to the end."""
    for first in range(max(0, len(way) - most), len(way)):
        rest = list(way[first:])
        if position.validate_tokens(rest) == len(rest):
            return rest
    return None


def _is_special(trie: TokenTrie, token_id: int) -> bool:
    return token_id >= trie.tokenizer.vocab_size or trie.tokenizer.is_special_token(token_id)


def _anything(trie: TokenTrie) -> Bitmask:
    """What may stand in a string without rules, and what may follow it."""
    position = compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string"}'), trie)
    position.consume_tokens(trie.tokenizer.tokenize_str('"'))
    return np.frombuffer(position.compute_bitmask(), dtype=np.int32)[: trie.num_words]


def _longest_first(tokens: dict[int, bytes]) -> list[int]:
    return sorted(tokens, key=lambda token_id: -len(tokens[token_id]))


def ids_of(mask: Bitmask) -> list[int]:
    """Most masks that are asked for are almost empty."""
    words = np.flatnonzero(mask)
    lines, bits = np.nonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32))
    found: list[int] = (words[lines] * 32 + bits).tolist()
    return found


def bits_of(token_ids: Sequence[int], num_words: int) -> Bitmask:
    mask = np.zeros(num_words, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask.view(np.int32)
