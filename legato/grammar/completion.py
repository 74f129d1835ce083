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
# Each of these leaves one key or value less to write.
_SEPARATORS: Final = frozenset(b"}],:")
# Tried in this order outside of strings when nothing can be closed. Digits come after what may follow a number, which
# would otherwise never end.
_OUTSIDE: Final = (
    *(',"', ",", ":", '""', "[]", "{}", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
    *("null", "true", "false", '"', "n", "t", "f", "-", "{", "[", ".", "e"),
)
_INSIDE: Final = ("0", "1", "a", "A", "e", "-", ".", "@", ":", "/", "n", "u")
_LARK_STRING: Final = re.compile(r'"(?:\\.|[^"\\\n])*"')
# Spare tokens below which masks are narrowed, in addition to what the schema can demand at once.
_WINDOW: Final = 64
# Limits of one search: positions expanded (about 10 ms), equivalent positions, tokens tried in a restricted string.
_MAX_POSITIONS: Final = 600
_MAX_EQUIVALENT: Final = 3
_MAX_LETTERS: Final = 48
# A new completion joins the previous one within so many tokens, if at all.
_JOIN_WITHIN: Final = 8
# Limits for one mask: tokens tested, and searches for them; a failed search takes as long as several successful ones.
_MAX_TESTED: Final = 1024
_MAX_SEARCHES: Final = 64
_FAILED_SEARCH: Final = 4
# Tokens that plain text may add to a completion: a minimum length may be reached with fewer or more of them.
_SLACK: Final = 4
_NUM_SAMPLES: Final = 16


class JsonTokens:
    """The tokens of a vocabulary by what they do to a JSON text. Takes a fraction of a second, once."""

    def __init__(self, trie: TokenTrie) -> None:
        self.trie, self.eos_token_id = trie, trie.tokenizer.eos_token
        ids = range(min(trie.vocab_size, trie.tokenizer.vocab_size))
        tokens = {i: trie.bytes_of(i) for i in ids if not trie.tokenizer.is_special_token(i)}
        tokens = {i: data for i, data in tokens.items() if data}
        self.eos = bits_of(trie.tokenizer.eos_tokens, trie.num_words)
        # Plain text: does not end a string and needs no escape.
        plain = bits_of([i for i, d in tokens.items() if _QUOTE not in d and _BACKSLASH not in d], trie.num_words)
        self.content = plain & _allowed_in_strings(trie)
        # Without parts of characters, which demand more tokens before a string may end.
        self.whole = self.content & bits_of([i for i, d in tokens.items() if _is_text(d)], trie.num_words)
        self.samples = sorted(ids_of(self.whole), key=lambda i: len(tokens[i]))  # by length
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

    def __init__(self, grammar: Grammar, tokens: JsonTokens, start: LLMatcher) -> None:
        self.tokens = tokens
        keys, size = _demands(_schemas(grammar))
        self.window = _WINDOW + size
        tokenize = tokens.trie.tokenizer.tokenize_str
        self._keys = [tokenize(json.dumps(key)[1:]) for key in keys]  # without the quote before them
        self.of_nothing = self.find(start, JsonScanner(), _MAX_POSITIONS) or []  # a whole document

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
        """Best first: fewest tokens, then most separators passed. Greedy: only the first option at each position, which
        is fast and nearly always good enough."""
        order, seen = count(), Counter[tuple[int, bytes]]()
        waiting = [(0, 0, next(order), position, scanner, list[int]())]
        for _ in range(_MAX_POSITIONS):
            if not waiting:
                return None
            length, passed, _, position, scanner, found = heapq.heappop(waiting)
            if position.is_accepting():
                return [*found, self.tokens.eos_token_id]
            if greedy:
                if length < _JOIN_WITHIN and (tail := _tail(position, known, most - length)):
                    return found + tail
            else:
                mark = (length, position.compute_bitmask())
                seen[mark] += 1
                if seen[mark] > _MAX_EQUIVALENT:
                    continue
            for tokens in islice(self._options(position, scanner), 1 if greedy else None):
                ahead = position.deep_copy()
                if length + len(tokens) < most and ahead.consume_tokens(tokens):
                    text = self.tokens.trie.tokenizer.decode_bytes(tokens)
                    behind = passed - sum(map(_SEPARATORS.__contains__, text))
                    there = (length + len(tokens), behind, next(order), ahead, scanner.after(text), found + tokens)
                    heapq.heappush(waiting, there)
        return None

    def _options(self, position: LLMatcher, scanner: JsonScanner) -> Iterator[list[int]]:
        """What can be closed is closed: adding text first makes no completion shorter."""
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
            if scanner.in_string:  # perhaps at the beginning of a key: prefer a required one
                yield from (key for key in self._keys if position.validate_tokens(key) == len(key))
            for token_id in self.tokens.inside if scanner.in_string else self.tokens.outside:
                if position.validate_tokens([token_id]):
                    yield [token_id]
        if scanner.in_string:
            # A restricted string, or a key that is the prefix of a required one.
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
    """The completion of one text, a function of its tokens alone: a preempted request continues in the same way."""

    def __init__(self, search: CompletionSearch, max_new_tokens: int, matcher: Matcher) -> None:
        self._search, self._tokens = search, search.tokens
        self._left = max_new_tokens
        self._next_look = max_new_tokens  # tokens left when the completion is updated next
        self._known = search.of_nothing  # the last completion
        self._is_near = False  # the limit: masks are narrowed
        # 1 if there is no room for the end-of-sequence token: the document is complete without it.
        self._extra = 0
        # Token -> length of the completion after it. Kept in an unrestricted string, where more text changes nothing.
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
                # A token lengthens the completion by at most the window.
                self._next_look = self._left - max(0, spare // (1 + window))
                return
        self._next_look = self._left * 3 // 4  # a search that fails here may succeed later

    def narrow(self, matcher: Matcher) -> None:
        """Takes the tokens out of a mask after which no completion fits."""
        if not self._is_near or matcher.mask is None:
            return
        spare = self._left + self._extra - 1 - len(self._known)
        doubtful = matcher.mask & ~self._tokens.eos
        plain = self._plain_text_that_fits(matcher, matcher.mask & self._tokens.content, spare) if spare >= 0 else None
        if plain is not None:
            doubtful &= ~self._tokens.content
            matcher.mask &= plain | ~self._tokens.content
        fitting = self._fitting(ids_of(doubtful)[:_MAX_TESTED], matcher) if spare >= 0 else []
        matcher.mask &= ~doubtful
        matcher.mask |= bits_of([*fitting, self._known[0]], len(matcher.mask))

    def _plain_text_that_fits(self, matcher: Matcher, plain: Bitmask, spare: int) -> Bitmask | None:
        """The tokens of plain text after which a completion fits, tested on samples because there are too many to test
        each. None where samples do not tell: then each has to be tested."""
        is_free = np.array_equal(plain, self._tokens.content)
        self._lengths = (self._lengths or {}) if is_free else None
        token_ids = self._tokens.samples if is_free else ids_of(plain)
        if not is_free and (spare < _SLACK or len(token_ids) <= _MAX_TESTED // 4):
            return None
        samples = token_ids[:: 1 + len(token_ids) // _NUM_SAMPLES]
        fit = [self._fits(token_id, matcher, min(spare, _SLACK)) for token_id in samples]
        if all(fit):
            return plain if spare >= _SLACK else self._tokens.whole
        if is_free and spare < _SLACK and not any(fit):
            return np.zeros_like(plain)
        self._lengths = None
        return None

    def _fits(self, token_id: int, matcher: Matcher, slack: int) -> bool:
        ahead = matcher.position.deep_copy()
        return ahead.consume_token(token_id) and _tail(ahead, self._known, len(self._known) + slack) is not None

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


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _tail(position: LLMatcher, known: Sequence[int], most: int) -> list[int] | None:
    """The part of a known completion that completes this text, too."""
    for first in range(max(0, len(known) - most), len(known)):
        tail = list(known[first:])
        if position.validate_tokens(tail) == len(tail):
            return tail
    return None


def _demands(schemas: list[Any]) -> tuple[list[str], int]:
    """Required keys, and an estimate of the bytes that a text can be obliged to write at once: twice the most that one
    part of a schema demands, in keys, the longest value of an enum, and minimum lengths."""
    keys, most, waiting = dict[str, None](), 0, [*schemas]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        size = sum(part[key] for key in ("minLength", "minItems") if isinstance(part.get(key), int))
        values = [part["const"]] if "const" in part else part.get("enum", ())
        size += max((len(json.dumps(value)) for value in values), default=0)
        if isinstance(required := part.get("required"), list):  # and not a property of that name
            keys |= dict.fromkeys(map(str, required))
            size += sum(len(str(key)) + 6 for key in required)
        most = max(most, size)
    return [*keys], 2 * most


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
