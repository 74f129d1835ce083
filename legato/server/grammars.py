"""Grammars of rows: masks are computed while the device is busy, so that a step seldom waits for one.

    step t      ├── forward ──┤ sample ├─ copy to host ─┤
    grammar                                             ├ accept, next masks ┤
    step t+1                           ├──────────── forward ────────────────┤ wait for masks, sample

Step t+1 is launched before the tokens of step t are known, and needs them only when it samples. So `accept` takes not
the tokens but a way to wait for them, and a thread of its own does the waiting. Everything that concerns one row
happens in order: each thing is started after the one before it was waited for.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from legato.grammar.compile import compile_grammar
from legato.grammar.completion.closing import Closing
from legato.grammar.completion.endings import Endings
from legato.grammar.completion.reach import reach_of
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.grammar.matcher import MaskWriter, Matcher
from legato.grammar.vocabulary import TokenTrie
from legato.modelfiles.files import ModelFiles
from legato.sampling.allowed import Allowed

logger = logging.getLogger(__name__)

# Compiled grammars to keep. Each takes up to 64 MB (`grammar/checker.py`), most of them some kilobytes.
_KEPT: Final = 32
# A part of the vocabulary that llguidance looks at once and then allows or forbids as one, as it does with what may
# stand in a JSON string. Half of all tokens are words, and so is most of what regular expressions allow.
WORDS: Final = r"[a-zA-Z ]{1,16}"
# Seconds. The router has compiled every grammar before it comes here, and masks have limits of their own: whoever
# waits that long waits for ever.
_PATIENCE: Final = 30.0


@dataclass(slots=True, eq=False)
class RowGrammar:
    """The grammar of the request in a row. `pending` is what was started last, and makes the mask."""

    grammar: Grammar
    pending: Future[None]
    max_new_tokens: int = 0  # JSON is finished before them; 0: nobody said
    matcher: Matcher | None = None  # None until the grammar is compiled
    closing: Closing | None = None  # of JSON with a limit
    error: str | None = None

    def settle(self) -> None:
        """Waits for the mask, or learns why there is none."""
        try:
            self.pending.result(_PATIENCE)
        except GrammarError as error:
            self.fail(str(error))
        except TimeoutError:
            self.fail("the grammar took too long")
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
        # Compiling is another thread's work than masks: those who have a grammar do not wait for those who come.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="compile-grammar")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._load_trie = load_trie  # a third of a second and 40 MB, which many servers never need
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()
        self._rows: dict[int, RowGrammar] = {}

    def close(self) -> None:
        for pool in (self._compiling, self._masking):
            pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Compiles a grammar, or finds it compiled. From any thread; the future raises GrammarError."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None or (compiled.done() and compiled.exception() is not None):
                compiled = self._compiling.submit(self._compile, grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return compiled

    def set_row(self, row: int, grammar: Grammar | None, generated_ids: Sequence[int], max_new_tokens: int = 0) -> None:
        """A request enters a row, for the first time or, after it was preempted, with what it has generated so far."""
        if grammar is None:
            self._rows.pop(row, None)
            return
        state = RowGrammar(grammar, Future(), max_new_tokens)
        self._rows[row] = state
        compiled = self.prepare(grammar)
        compiled.add_done_callback(lambda _: self._masking.submit(self._begin, state, compiled, list(generated_ids)))

    def active(self, rows: Sequence[int]) -> bool:
        return any(row in self._rows for row in rows)

    def allowed(self, rows: Sequence[int]) -> Allowed | None:
        """What the rows of a batch may choose from, as far as they have grammars. Waits for the masks.

        A row whose grammar failed is free to choose; `errors` says that nobody may believe what it chose.
        """
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        for _, state in states:
            self._settle(state)
        running = [(place, state.matcher) for place, state in states if state.error is None]
        if not running:
            return None
        masks = [matcher.mask for _, matcher in running if matcher is not None and matcher.mask is not None]
        assert len(masks) == len(running), "a row without an error has a mask"
        return Allowed([place for place, _ in running], torch.from_numpy(np.stack(masks)))

    def errors(self, rows: Sequence[int]) -> dict[int, str]:
        """Place in the batch -> message, for rows whose grammar failed. To be asked after `allowed`."""
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        return {place: state.error for place, state in states if state.error is not None}

    def accept(self, rows: Sequence[int], read: Callable[[], Sequence[int]]) -> None:
        """These rows get one token each; `read` waits for them. The masks of what follows are computed at once."""
        states = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        states = [(place, state) for place, state in states if state.error is None]
        if states:
            pending = self._masking.submit(self._advance, states, read)
            for _, state in states:
                state.pending = pending

    def _settle(self, state: RowGrammar) -> None:
        if state.error is not None:
            return
        state.settle()
        if state.error is None:
            return
        logger.warning("A request's grammar failed", extra={"fields": {"cause": state.error}})
        with self._lock:  # rows share what they learn of a grammar, errors included: the next one begins afresh
            self._compiled.pop(state.grammar, None)
        if not state.pending.done():  # a thread that does not come back: leave it behind
            self._masking.shutdown(wait=False)
            self._masking = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    # ---- on the other threads -------------------------------------------------------------------------------------

    @cached_property
    def _trie(self) -> TokenTrie:
        """First asked for by the one thread that compiles; by the time that others ask it is there."""
        return self._load_trie()

    @cached_property
    def _writer(self) -> MaskWriter:
        return MaskWriter(self._trie, num_threads=max(1, (os.cpu_count() or 2) // 2))

    @cached_property
    def _endings(self) -> Endings:
        return Endings(self._trie)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if reach_of(grammar) is not None:
            self._endings  # noqa: B018 - made now, by the thread that nobody waits for
        return compile_grammar(grammar, self._trie)

    def _begin(self, state: RowGrammar, compiled: Future[LLMatcher], generated_ids: list[int]) -> None:
        """The text so far, and the first mask."""
        try:
            matcher = Matcher(compiled.result(), has_json=state.grammar.has_json)
            reach = reach_of(state.grammar)
            if reach is not None and state.max_new_tokens:
                state.closing = Closing(self._endings, reach, self._trie, state.max_new_tokens)
            state.matcher = matcher
            for token_id in generated_ids:
                if state.closing is not None:  # which goes by what it has seen: it shall see the same again
                    self._fill_masks([state])
                self._follow(state, [token_id])
            self._fill_masks([state])
            state.pending.set_result(None)
        except BaseException as error:
            state.pending.set_exception(error)

    def _advance(self, states: list[tuple[int, RowGrammar]], read: Callable[[], Sequence[int]]) -> None:
        token_ids = read()
        for place, state in states:
            self._follow(state, [token_ids[place]])
        self._fill_masks([state for _, state in states])

    def _follow(self, state: RowGrammar, token_ids: list[int]) -> None:
        assert state.matcher is not None, "a row that got a token had a mask"
        state.matcher.accept(token_ids, self._trie)
        if state.closing is not None:
            state.closing.accept(token_ids)

    def _fill_masks(self, states: list[RowGrammar]) -> None:
        self._writer.fill_masks([state.matcher for state in states if state.matcher is not None])
        for state in states:
            matcher = state.matcher
            if state.closing is not None and matcher is not None and matcher.error is None and matcher.mask is not None:
                state.closing.narrow(matcher.position, matcher.mask)


def load_trie(files: ModelFiles, vocab_size: int) -> TokenTrie:
    tokenizer = files.tokenizer()
    trie = TokenTrie(tokenizer.to_str(), tokenizer.get_vocab_size(), vocab_size, files.eos_token_ids())
    trie.tokenizer = trie.tokenizer.with_slices([*LLTokenizer.general_slices(), WORDS])
    return trie
