"""Completes JSON before `max_tokens` runs out.

A completion is a list of tokens that ends the document from where it is: quotes and brackets closed, required keys
filled in. llguidance cannot be asked for one, but a copy of a matcher says in a microsecond whether it would accept
some tokens, so a completion is found by trying, what closes most first.

While a text has many more tokens left than its completion takes, it is left alone. Near its limit masks keep only the
tokens after which a completion still fits. Where even the first one does not fit, nothing is done: the text is cut off
like any other.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher

from legato.grammar.compile import compile_grammar, embedded_schemas
from legato.grammar.kinds import EMBEDDED_SCHEMA, Grammar, GrammarKind
from legato.grammar.matcher import Matcher
from legato.grammar.scanner import JsonScanner
from legato.grammar.vocabulary import Bitmask, TokenTrie

_QUOTE, _BACKSLASH = b'"\\'
# Behind each of these there is one key or value less to be written.
_PASSED: Final = frozenset(b"}],:")
# To be tried in this order outside of a string, once nothing can be closed. A digit comes after what may follow a
# number, which would else never end.
_OUTSIDE: Final = (
    *(',"', ",", ":", '""', "[]", "{}", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
    *("null", "true", "false", '"', "n", "t", "f", "-", "{", "[", ".", "e"),
)
_LARK_STRING: Final = re.compile(r'"(?:\\.|[^"\\\n])*"')
_INSIDE: Final = ("0", "1", "a", "A", "e", "-", ".", "@", ":", "/", "n", "u")
# Tokens before its limit at which a text is watched, besides those that its schema can demand at once.
_WINDOW: Final = 64
# Positions that a search looks at: some ten milliseconds.
_MAX_POSITIONS: Final = 600
# Positions that are as far and as free to go on as each other, of which it looks at no more.
_MAX_ALIKE: Final = 3
# Tokens of a narrow string that a search tries.
_MAX_LETTERS: Final = 48
# Tokens after which a new completion has met the one before, if it does.
_SOON: Final = 8
# Tokens whose completions are looked for before a mask is narrowed, and those for which one is searched.
_MAX_TRIED: Final = 1024
_MAX_SEARCHES: Final = 64
# One that fails takes as long as so many that succeed.
_FAILED_SEARCH: Final = 4
# What the content of a string may cost all the same: a minimum length is reached with fewer or more tokens.
_SLACK: Final = 4
_NUM_SAMPLES: Final = 16


class JsonTokens:
    """What the tokens of a vocabulary can do to a JSON text. Made once, in a fraction of a second."""

    def __init__(self, trie: TokenTrie) -> None:
        self.trie, self.eos_token_id = trie, trie.tokenizer.eos_token
        ids = range(min(trie.vocab_size, trie.tokenizer.vocab_size))
        tokens = {i: trie.bytes_of(i) for i in ids if not trie.tokenizer.is_special_token(i)}
        tokens = {i: data for i, data in tokens.items() if data}
        self.eos = bits_of(trie.tokenizer.eos_tokens, trie.num_words)
        # What leaves a string that may hold anything as it was.
        plain = bits_of([i for i, d in tokens.items() if _QUOTE not in d and _BACKSLASH not in d], trie.num_words)
        self.content = plain & _allowed_in_strings(trie)
        self.samples = sorted(ids_of(self.content), key=lambda i: len(tokens[i]))  # short ones and long ones
        longest_first = sorted(tokens, key=lambda i: -len(tokens[i]))
        by_text = {data: i for i, data in sorted(tokens.items(), reverse=True)}
        self.ends_of_values = [i for i in longest_first if not tokens[i].strip(b"]}")]
        self.ends_of_strings = [i for i in longest_first if tokens[i][0] == _QUOTE and not tokens[i][1:].strip(b"]}:")]
        self.outside = [by_text[text.encode()] for text in _OUTSIDE if text.encode() in by_text]
        self.inside = [i for i in longest_first if not tokens[i].strip(b" ")]
        self.inside += [by_text[text.encode()] for text in _INSIDE if text.encode() in by_text]
        self.end_of_key = trie.tokenizer.tokenize_bytes(b'":')

    def is_content(self, token_id: int) -> bool:
        return bool(self.content[token_id // 32] >> token_id % 32 & 1)


class CompletionSearch:
    """Finds completions of the texts of one grammar."""

    def __init__(self, grammar: Grammar, tokens: JsonTokens) -> None:
        self.tokens = tokens
        keys, size = _demands(_schemas(grammar))
        self.window = _WINDOW + size
        tokenize = tokens.trie.tokenizer.tokenize_str
        self._keys = [tokenize(json.dumps(key)[1:]) for key in keys]  # without the quote before them

    def find(self, position: LLMatcher, scanner: JsonScanner, most: int, known: Sequence[int] = ()) -> list[int] | None:
        """At most so many tokens, the end-of-sequence token included. `known` is a completion of a similar text."""
        return (
            _tail(position, known, most)
            or self.search(position, scanner, most, known, greedy=True)
            or self.search(position, scanner, most, known, greedy=False)
        )

    def search(
        self, position: LLMatcher, scanner: JsonScanner, most: int, known: Sequence[int], *, greedy: bool
    ) -> list[int] | None:
        """The shortest first; of those as long as each other, first those that have more behind them. Greedy: the first
        option everywhere, which is quick and nearly always good enough."""
        order, seen = count(), Counter[tuple[int, bytes]]()
        waiting = [(0, 0, next(order), position, scanner, list[int]())]
        for _ in range(_MAX_POSITIONS):
            if not waiting:
                return None
            length, passed, _, position, scanner, found = heapq.heappop(waiting)
            if position.is_accepting():
                return [*found, self.tokens.eos_token_id]
            if greedy:
                if length < _SOON and (tail := _tail(position, known, most - length)):
                    return found + tail
            else:
                mark = (length, position.compute_bitmask())
                seen[mark] += 1
                if seen[mark] > _MAX_ALIKE:
                    continue
            for tokens in islice(self._options(position, scanner), 1 if greedy else None):
                ahead = position.deep_copy()
                if length + len(tokens) < most and ahead.consume_tokens(tokens):
                    text = self.tokens.trie.tokenizer.decode_bytes(tokens)
                    behind = passed - sum(map(_PASSED.__contains__, text))
                    there = (length + len(tokens), behind, next(order), ahead, scanner.after(text), found + tokens)
                    heapq.heappush(waiting, there)
        return None

    def _options(self, position: LLMatcher, scanner: JsonScanner) -> Iterator[list[int]]:
        """Whatever can be closed is closed: no completion gets shorter by what is put in before."""
        if forced := self._forced(position):
            yield forced
            return
        closes = False
        if not scanner.escaped:
            for token_id in self.tokens.ends_of_strings if scanner.in_string else self.tokens.ends_of_values:
                if position.validate_tokens([token_id]):
                    closes = True
                    yield [token_id]
        if not closes:
            if scanner.in_string:  # perhaps at the beginning of a key: it had better be one that is missing
                yield from (key for key in self._keys if position.validate_tokens(key) == len(key))
            for token_id in self.tokens.inside if scanner.in_string else self.tokens.outside:
                if position.validate_tokens([token_id]):
                    yield [token_id]
        if scanner.in_string:
            # One that may not hold just anything. A key may be the beginning of another one, which is the one missing.
            end = self.tokens.end_of_key
            letters = np.frombuffer(position.compute_bitmask(), dtype=np.int32)
            if not closes or (position.validate_tokens(end) == len(end) and np.count_nonzero(letters) <= _MAX_LETTERS):
                yield from ([token_id] for token_id in ids_of(letters)[:_MAX_LETTERS])

    def _forced(self, position: LLMatcher) -> list[int]:
        if tokens := position.compute_ff_tokens():
            return tokens
        tokens = self.tokens.trie.tokenizer.tokenize_bytes(position.compute_ff_bytes())
        return tokens if position.validate_tokens(tokens) == len(tokens) else []


class JsonCompletion:
    """One text: told of every token, asked after every mask. What it does depends on nothing but the tokens."""

    def __init__(self, search: CompletionSearch, max_new_tokens: int, matcher: Matcher) -> None:
        self._search, self._tokens = search, search.tokens
        self._left = max_new_tokens
        self._next_look = max_new_tokens  # tokens left when it is looked again whether they suffice
        self._known: list[int] = []  # the last completion
        self._is_near = False  # to the limit: masks are narrowed
        # 1 where there is no room for the end-of-sequence token: a whole document without it is still whole.
        self._extra = 0
        # In a string that may hold anything, more text changes nothing: token -> length of a completion after it.
        self._lengths: dict[int, float] | None = None
        self._look(matcher)

    def accept(self, token_id: int, matcher: Matcher) -> None:
        """After the matcher has accepted it."""
        self._left -= 1
        if self._lengths is not None and not self._tokens.is_content(token_id):
            self._lengths = None
        if self._left <= self._next_look:
            self._look(matcher)

    def _look(self, matcher: Matcher) -> None:
        self._is_near = False
        if self._left < 1 or matcher.is_complete or matcher.error is not None:
            return
        for extra in range(self._extra, 2):
            found = self._search.find(matcher.position, matcher.scanner, self._left + extra, self._known)
            if found is not None:
                self._known, self._extra, window = found, extra, self._search.window
                spare = self._left - len(found) - window
                self._is_near = spare <= 0
                # No token makes a completion longer than the window.
                self._next_look = self._left - max(0, spare // (1 + window))
                return
        self._next_look = self._left * 3 // 4  # a search may fail here and succeed elsewhere

    def narrow(self, matcher: Matcher) -> None:
        """Takes the tokens out of a mask after which no completion fits."""
        if not self._is_near or matcher.mask is None:
            return
        spare = self._left + self._extra - 1 - len(self._known)
        doubtful = matcher.mask & ~self._tokens.eos
        if spare >= _SLACK and self._plain_tokens_fit(matcher, matcher.mask & self._tokens.content):
            doubtful &= ~self._tokens.content
        fitting = self._fitting(ids_of(doubtful)[:_MAX_TRIED], matcher) if spare >= 0 else []
        matcher.mask &= ~doubtful
        matcher.mask |= bits_of([*fitting, self._known[0]], len(matcher.mask))

    def _plain_tokens_fit(self, matcher: Matcher, plain: Bitmask) -> bool:
        """Whether the completion stays as it is, or nearly, whatever text without quotes is added: where there are too
        many of them to try each, some are tried. In a string that may hold anything that is so until its end."""
        is_free = np.array_equal(plain, self._tokens.content)
        self._lengths = (self._lengths or {}) if is_free else None
        token_ids = self._tokens.samples if is_free else ids_of(plain)
        if not is_free and len(token_ids) <= _MAX_TRIED // 4:
            return False
        for token_id in token_ids[:: 1 + len(token_ids) // _NUM_SAMPLES]:
            ahead = matcher.position.deep_copy()
            if not ahead.consume_token(token_id) or not _tail(ahead, self._known, len(self._known) + _SLACK):
                self._lengths = None
                return False
        return True

    def _fitting(self, token_ids: list[int], matcher: Matcher) -> list[int]:
        most, searches = self._left + self._extra - 1, _MAX_SEARCHES
        lengths = {} if self._lengths is None else self._lengths
        for token_id in token_ids:
            if token_id in lengths and not most < lengths[token_id] < math.inf:
                continue
            ahead = matcher.position.deep_copy()
            ahead.consume_token(token_id)
            found = _tail(ahead, self._known, most)
            if found is None and searches > 0:
                scanner = matcher.scanner.after(self._tokens.trie.bytes_of(token_id))
                found = self._search.search(ahead, scanner, most, self._known, greedy=True)
                searches -= 1 if found is not None else _FAILED_SEARCH
            lengths[token_id] = math.inf if found is None else len(found)
        return [token_id for token_id in token_ids if lengths[token_id] <= most]


def _tail(position: LLMatcher, known: Sequence[int], most: int) -> list[int] | None:
    """The part of a known completion that completes this text, too."""
    for first in range(max(0, len(known) - most), len(known)):
        tail = list(known[first:])
        if position.validate_tokens(tail) == len(tail):
            return tail
    return None


def _demands(schemas: list[Any]) -> tuple[list[str], int]:
    """Required keys, and about how many bytes a schema can oblige a text to write at once: keys, the rest of an enum's
    value, a minimum length. What is demanded several times over counts once."""
    keys, size, waiting = dict[str, None](), 0, [*schemas]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        if isinstance(required := part.get("required"), list):  # and not a property of that name
            keys |= dict.fromkeys(map(str, required))
        size += sum(part[key] for key in ("minLength", "minItems") if isinstance(part.get(key), int))
        values = [part["const"]] if "const" in part else part.get("enum", ())
        size += max((len(json.dumps(value)) for value in values), default=0)
    return [*keys], size + sum(len(key) + 6 for key in keys)


def completes(grammar: Grammar) -> bool:
    """Whether its texts are JSON, with nothing but fixed words around it."""
    if grammar.kind is GrammarKind.LARK:
        rules = grammar.value
        for start, end, _ in reversed([*embedded_schemas(rules)]):
            rules = rules[:start] + rules[end:]
        rules = _LARK_STRING.sub("", rules)
        return EMBEDDED_SCHEMA in rules and not {"/", "%"} & set(rules.replace(EMBEDDED_SCHEMA, ""))
    return grammar.has_json


def _schemas(grammar: Grammar) -> list[Any]:
    if grammar.kind is GrammarKind.LARK:
        return [schema for _, _, schema in embedded_schemas(grammar.value)]
    return [json.loads(grammar.value)] if grammar.kind is GrammarKind.JSON_SCHEMA else []


def _allowed_in_strings(trie: TokenTrie) -> Bitmask:
    position = compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string"}'), trie)
    position.consume_tokens(trie.tokenizer.tokenize_str('"'))
    return np.frombuffer(position.compute_bitmask(), dtype=np.int32)[: trie.num_words]


def ids_of(mask: Bitmask) -> list[int]:
    """Of a mask that is almost empty, as most are."""
    words = np.flatnonzero(mask)
    lines, bits = np.nonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32))
    found: list[int] = (words[lines] * 32 + bits).tolist()
    return found


def bits_of(token_ids: Sequence[int], num_words: int) -> Bitmask:
    mask = np.zeros(num_words, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask.view(np.int32)
