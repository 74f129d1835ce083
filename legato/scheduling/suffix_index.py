"""Finds earlier occurrences of the last tokens of a text; the longest match gives the draft tokens.

What a suffix automaton would find for suffixes of two tokens and more, at a twentieth of its memory: a table from pairs
of tokens to where they occurred, the most recent first, of which a few are compared backwards. A match that goes on to
be right is followed token by token, without looking anything up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

Tokens: TypeAlias = Sequence[int]

# Occurrences of a pair that are compared, the most recent first, and up to how many tokens before it.
MOST_COMPARED = 8
LONGEST_MATCH = 32
# Tokens of a prompt, from its end, that are indexed: 3 ms of the scheduler's time.
MOST_PROMPT_TOKENS = 32_768
# Tokens of recent answers that are kept of a tenant, and of how many tenants.
MOST_RECENT_TOKENS = 32_768
MOST_TENANTS = 16
SHORTEST_ANSWER = 8
# Tokens of recent answers that are indexed for one request that begins: a millisecond, in which so many of a prompt are
# for each of them.
MOST_INDEXED, PROMPT_TOKENS_IN_ONE = 4096, 2
# Bytes for each pair of a prompt by which most of those that are not there are told.
MARKS_PER_PAIR = 2
END_OF_TEXT = -1
_FACTOR = 1_000_003
_MASK = (1 << 62) - 1


def _key(first: int, second: int) -> int:
    """Of a pair. Two pairs may have the same: comparing tells them apart."""
    return (first * _FACTOR + second) & _MASK


class PromptIndex:
    """Of a text that does not change, in two sorted arrays. Most pairs of an answer are not in its prompt: `may_have`
    says so without searching."""

    def __init__(self, tokens: array[int], num_tokens: int) -> None:
        first = max(0, num_tokens - MOST_PROMPT_TOKENS)
        numbers = np.frombuffer(tokens, dtype=np.int64)[first:num_tokens].astype(np.uint64)
        keys = (numbers[:-1] * np.uint64(_FACTOR) + numbers[1:]) & np.uint64(_MASK)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order].astype(np.int64)
        self._positions = (order + (first + 2)).astype(np.int32)
        self._mark_mask = (1 << (len(keys) * MARKS_PER_PAIR).bit_length()) - 1
        marks = np.zeros(self._mark_mask + 1, dtype=np.uint8)
        marks[self._keys & self._mark_mask] = 1
        self._marks = marks.tobytes()

    def may_have(self, key: int) -> int:
        return self._marks[key & self._mark_mask]

    def behind(self, key: int) -> Iterator[int]:
        """Positions behind the pairs with this key, the last first."""
        last = int(self._keys.searchsorted(key, side="right"))
        for place in range(last - 1, max(last - 1 - MOST_COMPARED, -1), -1):
            if self._keys[place] != key:
                return
            yield int(self._positions[place])


class GrowingIndex:
    """Of a text that grows, from position `start` on."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.latest: dict[int, int] = {}
        self._earlier = array("i")  # by position, counted from `start`: of the occurrence before, 0 if there is none

    def add(self, key: int) -> None:
        """The text is one token longer, and ends with this pair."""
        self._earlier.append(self.latest.get(key, 0))
        self.latest[key] = self._start + len(self._earlier)

    def extend(self, before: int, tokens: Tokens) -> None:
        """The text is longer by these tokens; `before` was its last."""
        latest, earlier, end = self.latest, self._earlier, self._start + len(self._earlier)
        for end, token in enumerate(tokens, end + 1):  # noqa: B020
            key = (before * _FACTOR + token) & _MASK
            earlier.append(latest.get(key, 0))
            latest[key] = end
            before = token

    def __len__(self) -> int:
        return len(self._earlier)

    def behind(self, key: int) -> Iterator[int]:
        position = self.latest.get(key, 0)
        for _ in range(MOST_COMPARED):
            if not position:
                return
            yield position
            position = self._earlier[position - self._start - 1]


class RecentAnswers:
    """Of one tenant: answers one behind the other, the oldest half of them forgotten when there are too many. They are
    indexed when a request looks for drafts, and not when they end: where steps have no drafts, they cost nothing."""

    def __init__(self) -> None:
        self.tokens = array("q", [END_OF_TEXT])
        self.index = GrowingIndex(1)
        self._num_indexed = 1

    def add(self, answer: array[int]) -> None:
        if len(self.tokens) + len(answer) > MOST_RECENT_TOKENS:
            kept = self.tokens[-(MOST_RECENT_TOKENS // 2) :]
            self.tokens, self.index, self._num_indexed = array("q", [END_OF_TEXT]), GrowingIndex(1), 1
            self.tokens.extend(kept)
        self.tokens.extend(answer[-(MOST_RECENT_TOKENS // 2) :])
        self.tokens.append(END_OF_TEXT)

    def catch_up(self) -> int:
        """Index some of the tokens that are not yet. Returns how many."""
        first = self._num_indexed
        self._num_indexed = min(len(self.tokens), first + MOST_INDEXED)
        self.index.extend(self.tokens[first - 1], self.tokens[first : self._num_indexed])
        return self._num_indexed - first


class TenantAnswers:
    """Recent outputs by tenant, so that no drafts come from another tenant's text. LRU eviction."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, RecentAnswers] = OrderedDict()

    def of(self, tenant: str) -> tuple[RecentAnswers | None, int]:
        """To be asked when a request of this tenant begins to look for drafts. Some of the answers are indexed then:
        also returns how many tokens of a prompt are in the same time."""
        answers = self._by_tenant.get(tenant)
        return answers, 0 if answers is None else PROMPT_TOKENS_IN_ONE * answers.catch_up()

    def add(self, tenant: str, answer: array[int]) -> None:
        if len(answer) < SHORTEST_ANSWER:
            return
        answers = self._by_tenant.setdefault(tenant, RecentAnswers())
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > MOST_TENANTS:
            self._by_tenant.popitem(last=False)
        answers.add(answer)


class TextMatch:
    """One request's text, and the match that it follows: what comes next is what came next there."""

    def __init__(self, tokens: array[int], num_prompt: int, answers: RecentAnswers | None) -> None:
        self._tokens = tokens
        self._num_read = num_prompt
        self._prompt = PromptIndex(tokens, num_prompt)
        self._own = GrowingIndex(num_prompt)
        self._answers = answers
        self._source: array[int] = tokens
        self._position = 0
        self.length = 0  # of the match in tokens; 0: there is none
        if num_prompt > 1:
            self._find(_key(tokens[num_prompt - 2], tokens[num_prompt - 1]))

    def unread(self) -> int:
        return len(self._tokens) - self._num_read

    @property
    def num_own(self) -> int:
        """Tokens that were indexed one by one."""
        return len(self._own)

    def read(self) -> bool | None:
        """The next token of the text. Returns whether the match had it right; None if there was none."""
        tokens, place = self._tokens, self._num_read
        token, guess = tokens[place], None
        self._num_read = place + 1
        key = (tokens[place - 1] * _FACTOR + token) & _MASK if place else 0
        if self.length and self._position < len(self._source):
            guess = self._source[self._position]
        if guess == token:
            self.length += 1
            self._position += 1
        else:
            self._find(key)
        self._own.add(key)
        return None if guess is None else guess == token

    def skip(self) -> None:
        """Index all tokens but the last, without looking where they occurred before. There is no match."""
        tokens, first, last = self._tokens, self._num_read, len(self._tokens) - 1
        if first < last:
            self._own.extend(tokens[first - 1] if first else 0, tokens[first:last])
            self._num_read = last

    def guess(self, count: int) -> list[int]:
        """What comes next. A match with the end of the text itself is a loop, and goes on in what was guessed."""
        if not self.length:
            return []
        source, position = self._source, self._position
        found = list(source[position : position + count])
        if source is self._tokens:
            period = len(source) - position
            while period and len(found) < count:
                found.append(found[-period])
        return found

    def _find(self, key: int) -> None:
        """The longest match of the text up to here, whose last pair has this key and is not in its index yet. The most
        recent of equal ones, first in the answer itself."""
        self.length = 0
        answers = self._answers
        is_own, is_prompts = key in self._own.latest, self._prompt.may_have(key)
        is_recent = answers is not None and key in answers.index.latest
        if not (is_own or is_prompts or is_recent):
            return
        tokens, end = self._tokens, self._num_read
        places = [(tokens, self._own.behind(key))] if is_own else []
        if is_prompts:
            places.append((tokens, self._prompt.behind(key)))
        if is_recent and answers is not None:
            places.append((answers.tokens, answers.index.behind(key)))
        for source, positions in places:
            for position in positions:
                if source is tokens and position >= end:
                    continue
                length = _common(tokens, end, source, position)
                if length > self.length and length >= 2:
                    self._source, self._position, self.length = source, position, length


def _common(tokens: Tokens, end: int, source: Tokens, position: int) -> int:
    """How many tokens before the two places are the same."""
    length, most = 0, min(end, position, LONGEST_MATCH)
    while length < most and tokens[end - 1 - length] == source[position - 1 - length]:
        length += 1
    return length
