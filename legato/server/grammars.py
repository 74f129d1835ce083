"""Grammars of rows: masks are computed while the device is busy, so that a step seldom waits for one.

    step t      ├── forward ──┤ sample ├─ copy to host ─┤
    masks                                               ├ accept, next masks ┤
    step t+1                           ├──────────── forward ────────────────┤ wait for masks, sample

Step t+1 is launched before the tokens of step t are known, and needs them only when it samples. So `accept` takes not
the tokens but a function that waits for them, and calls it on a thread of its own. Compiling has another thread, and so
have rows that enter, which may have a long text to replay: running rows do not wait for either.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from legato.cpu.threads import usable_cores
from legato.grammar.compile import compile_grammar
from legato.grammar.completion import CompletionSearch, JsonCompletion, JsonTokens, completes
from legato.grammar.errors import GrammarError, MaskTimeout
from legato.grammar.kinds import Grammar
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.reasoning import RowReasoning
from legato.grammar.vocabulary import Bitmask, TokenTrie
from legato.modelfiles.files import ModelFiles
from legato.sampling.allowed import Allowed

logger = logging.getLogger(__name__)

# Compiled grammars to keep. Each takes up to 64 MB (`grammar/checker.py`), most of them some kilobytes.
_KEPT: Final = 32
# A part of the vocabulary that llguidance looks at once and then allows or forbids as one, as it does with what may
# stand in a JSON string. Half of all tokens are words, and so is most of what regular expressions allow.
WORDS: Final = r"[a-zA-Z ]{1,16}"
# Seconds that a step waits for the next mask, once the tokens before it are on the host. Masks take milliseconds.
_MASK_SECONDS: Final = 2.0
# Seconds that it waits for those tokens, which is a wait for the device.
_TOKEN_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    start: LLMatcher
    search: CompletionSearch | None  # of JSON


@dataclass(slots=True, eq=False)
class RowGrammar:
    """The grammar of the request in a row."""

    grammar: Grammar | None  # None: only the reasoning has limits
    max_new_tokens: int = 0  # JSON is completed before them; 0: without a limit
    reasoning: RowReasoning | None = None  # the grammar applies after it
    search: CompletionSearch | None = None  # of JSON
    num_tokens: int = 0  # followed so far
    num_chosen: int = 0  # those on their way to the host included
    matcher: Matcher | None = None  # None until the grammar is compiled
    completion: JsonCompletion | None = None  # of JSON with a limit
    error: str | None = None
    tokens: Future[None] = field(default_factory=Future)  # are on the host
    pending: Future[None] = field(default_factory=Future)  # makes the mask of what follows them
    # The first of those: the text so far is followed. A row that is free may have got tokens by then.
    entered: Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self.entered = self.pending

    @property
    def is_free(self) -> bool:
        """Whether the next token may be any, whatever those are that have not reached the host."""
        if self.grammar is not None or self.reasoning is None:
            return False
        return self.reasoning.has_ended or self.num_chosen < self.reasoning.budget

    @property
    def follows_grammar(self) -> bool:
        return self.matcher is not None and (self.reasoning is None or not self.reasoning.is_inside)

    @property
    def mask(self) -> Bitmask | None:
        """What may come next. None: anything."""
        mask = self.matcher.mask if self.follows_grammar and self.matcher is not None else None
        return mask if self.reasoning is None else self.reasoning.restrict(mask, has_grammar=self.grammar is not None)

    def wait(self, deadline: float) -> None:
        """For the mask, or the reason why there is none."""
        try:
            self.pending.result(max(0, deadline - time.monotonic()))
        except GrammarError as error:
            self.fail(str(error))
        except TimeoutError:
            self.fail(str(MaskTimeout(_MASK_SECONDS)))
        except Exception as error:
            logger.exception("A grammar failed")
            self.fail(f"{type(error).__name__}: {error}")
        if self.matcher is not None and self.matcher.error is not None:
            self.fail(self.matcher.error)

    def fail(self, message: str) -> None:
        self.error = self.error or f"Grammar error: {message}"


class Grammars:
    """Called on the engine's thread, but for `prepare`. A grammar that fails costs its own request and no other."""

    def __init__(self, load_trie: Callable[[], TokenTrie]) -> None:
        self._compiling = _thread("compile-grammar")
        self._entering = _thread("enter-grammar")
        self._masking = _thread("grammar-masks")
        self._load_trie = load_trie  # a third of a second and 40 MB, which many servers never need
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._lock = Lock()
        self._rows: dict[int, RowGrammar] = {}

    def close(self) -> None:
        for thread in (self._compiling, self._entering, self._masking):
            thread.shutdown(wait=False, cancel_futures=True)

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compiles a grammar, or finds it compiled. From any thread; the future raises GrammarError."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None or (compiled.done() and compiled.exception() is not None):
                compiled = self._compiling.submit(self._compile, grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return compiled

    def set_row(
        self,
        row: int,
        grammar: Grammar | None,
        generated_ids: Sequence[int],
        max_new_tokens: int = 0,
        reasoning: RowReasoning | None = None,
    ) -> None:
        """A request enters a row, for the first time or, after it was preempted, with what it has generated so far."""
        if grammar is None and (reasoning is None or not reasoning.has_budget):
            self._rows.pop(row, None)
            return
        state = self._rows[row] = RowGrammar(grammar, max_new_tokens, reasoning, num_chosen=len(generated_ids))
        state.tokens.set_result(None)
        compiled = self._compiling.submit(self._prepare_trie) if grammar is None else self.prepare(grammar)
        compiled.add_done_callback(lambda _: self._entering.submit(self._enter, state, compiled, list(generated_ids)))

    def forget_rows(self) -> None:
        self._rows.clear()

    def active(self, rows: Sequence[int]) -> bool:
        return any(row in self._rows for row in rows)

    def allowed(self, rows: Sequence[int]) -> Allowed | None:
        """What the rows of a batch may choose from, as far as they have grammars. Waits for the masks.

        A row whose grammar failed is free to choose; `errors` says that its token means nothing.
        """
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        states = [(place, state) for place, state in states if not state.is_free]
        for _, state in states:
            wait_for({state.tokens}, _TOKEN_SECONDS)
            if state.grammar is None:  # nobody has prepared the vocabulary before the request came
                wait_for({state.entered}, _TOKEN_SECONDS)
        deadline = time.monotonic() + _MASK_SECONDS
        for _, state in states:
            if state.error is None:
                self._wait(state, deadline)
            if state.error is None:  # many rows may enter at once: those that wait their turn are not late
                deadline = time.monotonic() + _MASK_SECONDS
        running = [(place, state) for place, state in states if state.error is None]
        masks = {place: mask for place, state in running if (mask := state.mask) is not None}
        assert all(place in masks for place, state in running if state.follows_grammar), "a row has a mask or an error"
        return Allowed(list(masks), torch.from_numpy(np.stack(list(masks.values())))) if masks else None

    def errors(self, rows: Sequence[int]) -> dict[int, str]:
        """Place in the batch -> message, for rows whose grammar failed. To be asked after `allowed`."""
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        return {place: state.error for place, state in states if state.error is not None}

    def forced(self, rows: Sequence[int], count: int) -> dict[int, list[int]]:
        """Place in the batch -> up to `count` tokens of the only text that may follow, for rows where there is only
        one. Waits for the masks, as the next step would."""
        found: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            state = self._rows.get(row)
            if state is None or state.is_free or state.error is not None:
                continue
            wait_for({state.pending}, _MASK_SECONDS)
            if state.pending.done() and state.follows_grammar and state.matcher is not None:
                tokens = state.matcher.forced()[:count]
                if tokens:
                    found[place] = tokens
        return found

    def accept(self, rows: Sequence[int], read: Callable[[], Sequence[int]]) -> None:
        """These rows get one token each; `read` waits for them. The masks of what follows are computed at once."""
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        states = [(place, state) for place, state in states if state.error is None]
        if states:
            tokens = Future[None]()
            for _, state in states:
                state.tokens, state.pending = tokens, Future()
                state.num_chosen += 1
            self._masking.submit(
                self._advance, [(place, state, state.pending) for place, state in states], tokens, read
            )

    def _wait(self, state: RowGrammar, deadline: float) -> None:
        state.wait(deadline)
        if state.error is None:
            return
        logger.warning("A request's grammar failed", extra={"fields": {"cause": state.error}})
        if state.grammar is None:
            return
        with self._lock:  # rows share what they learn of a grammar, errors included: the next one begins afresh
            self._compiled.pop(state.grammar, None)
        if not state.pending.done():  # a thread that does not come back is left behind
            for thread in (self._entering, self._masking):
                thread.shutdown(wait=False)
            self._entering, self._masking = _thread("enter-grammar"), _thread("grammar-masks")

    # ---- on the other threads -------------------------------------------------------------------------------------

    @cached_property
    def _trie(self) -> TokenTrie:
        """First asked for by the one thread that compiles; by the time that others ask it is there."""
        return self._load_trie()

    @cached_property
    def _writer(self) -> MaskWriter:
        return MaskWriter(self._trie, num_threads=mask_threads())

    @cached_property
    def _json_tokens(self) -> JsonTokens:
        return JsonTokens(self._trie)

    def _prepare_trie(self) -> None:
        self._trie  # noqa: B018 - for rows without a grammar, whose reasoning has a budget

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self._writer  # noqa: B018 - made now, by a thread that no step waits for
        start = compile_grammar(grammar, self._trie)
        search = CompletionSearch(grammar, self._json_tokens, start) if completes(grammar) else None
        return CompiledGrammar(start, search)

    def _enter(
        self, state: RowGrammar, compiled: Future[CompiledGrammar] | Future[None], generated_ids: list[int]
    ) -> None:
        """Follows the text so far, for which no masks are needed, and computes the first one."""
        try:
            grammar = compiled.result()
            if state.reasoning is not None:
                state.reasoning.goes_on = self._trie.all_but_ends
            if grammar is not None and state.grammar is not None:
                state.matcher = Matcher(grammar.start, has_json=state.grammar.has_json)
                state.search = grammar.search
                if state.reasoning is None:
                    self._begin_completion(state)
            for token_id in generated_ids:
                self._follow(state, token_id)
            self._fill_masks([state])
            self._finish(state, state.entered)
        except BaseException as error:
            state.entered.set_exception(error)

    def _advance(
        self, rows: list[tuple[int, RowGrammar, Future[None]]], tokens: Future[None], read: Callable[[], Sequence[int]]
    ) -> None:
        try:
            token_ids = read()
            tokens.set_result(None)
            rows = [(place, state, pending) for place, state, pending in rows if _has_entered(state, pending)]
            for place, state, _ in rows:
                self._follow(state, token_ids[place])
            self._fill_masks([state for _, state, _ in rows])
            # Those first that have nothing more to do: no row waits for the completion of another's JSON.
            for _, state, pending in sorted(rows, key=lambda row: row[1].completion is not None):
                self._finish(state, pending)
        except BaseException as error:
            for future in [tokens, *(pending for _, _, pending in rows)]:
                if not future.done():
                    future.set_exception(error)

    def _fill_masks(self, states: list[RowGrammar]) -> None:
        matchers = [state.matcher for state in states if state.follows_grammar and state.matcher is not None]
        if matchers:
            self._writer.fill_masks(matchers)

    def _begin_completion(self, state: RowGrammar) -> None:
        """Of JSON, in the tokens that are left for it."""
        left = state.max_new_tokens - state.num_tokens
        if state.search is not None and state.max_new_tokens and left > 0 and state.matcher is not None:
            state.completion = JsonCompletion(state.search, left, state.matcher)

    def _follow(self, state: RowGrammar, token_id: int) -> None:
        reasoning = state.reasoning
        if reasoning is not None and not reasoning.has_ended:
            if reasoning.accept(token_id, self._trie):
                state.num_tokens += 1
                if reasoning.has_ended:
                    self._begin_completion(state)
                return
            self._begin_completion(state)  # there is none, and this token is the first of the text
        state.num_tokens += 1
        if state.matcher is None:
            return
        state.matcher.accept([token_id], self._trie)
        if state.completion is not None:
            state.completion.accept(token_id, state.matcher)

    def _finish(self, state: RowGrammar, pending: Future[None]) -> None:
        if state.completion is not None and state.matcher is not None and state.matcher.error is None:
            state.completion.narrow(state.matcher)
        pending.set_result(None)


def _has_entered(state: RowGrammar, pending: Future[None]) -> bool:
    """Waits for it. A row that could not enter has no next mask either."""
    error = state.entered.exception(_TOKEN_SECONDS)
    if error is not None:
        pending.set_exception(error)
    return error is None


def mask_threads() -> int:
    """Half of the cores: a device or the engine's threads compute meanwhile."""
    return max(1, usable_cores() // 2)


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


def load_trie(files: ModelFiles, vocab_size: int) -> TokenTrie:
    tokenizer = files.tokenizer()
    trie = TokenTrie(tokenizer.to_str(), tokenizer.get_vocab_size(), vocab_size, files.eos_token_ids())
    trie.tokenizer = trie.tokenizer.with_slices([*LLTokenizer.general_slices(), WORDS])
    return trie
