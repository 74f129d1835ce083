"""Grammars of requests, before anything is scheduled: refused with a reason, or ready to be followed.

read_grammar       what the client wrote                     (grammar_shapes.py)
GrammarCompiler    compiles it within limits, once           (grammar_process.py)
... prepare        has the shards compile it, so that no step waits for that
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from tokenizers import Tokenizer

from legato.api.errors import GenerationFailed, InvalidRequest
from legato.common.errors import LegatoError
from legato.grammar.compile import check_size, lenient
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.grammar.process import CheckerProcesses
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import ModelLimits

logger = logging.getLogger(__name__)

# Grammars whose verdict is remembered.
_REMEMBERED: Final = 256


class GrammarCompiler:
    """Compiles each grammar once, however many requests come with it at the same time. Never blocks the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        settings: RouterSettings,
        prepare: Callable[[Grammar], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` has the shards compile a grammar, too; it raises GrammarError, and LegatoError if they are lost."""
        self._supported = settings.grammar_support
        self._lenient = settings.schema_lenient
        self._prepare = prepare
        self._processes = CheckerProcesses(tokenizer, limits.vocab_size, sorted(limits.eos_token_ids))
        self._verdicts: OrderedDict[Grammar, asyncio.Task[list[str]]] = OrderedDict()

    async def check(self, grammar: Grammar, field: str = "grammar") -> Grammar:
        """The grammar to follow: the one that was asked for, or what a lenient reading makes of it. InvalidRequest."""
        if not self._supported:
            raise InvalidRequest("grammar is not supported", field)
        try:
            check_size(grammar)
            grammar = lenient(grammar) if self._lenient else grammar
            await asyncio.shield(self._verdict(grammar))  # others may wait for it, too
            if self._prepare is not None:
                await self._prepare(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"grammar is not valid: {error}", field) from None
        except LegatoError as error:
            raise GenerationFailed(str(error)) from None
        return grammar

    def close(self) -> None:
        self._processes.close()

    def _verdict(self, grammar: Grammar) -> asyncio.Task[list[str]]:
        verdict = self._verdicts.pop(grammar, None)
        if verdict is None:
            verdict = asyncio.create_task(self._compile(grammar))
            verdict.add_done_callback(_look)
            if len(self._verdicts) >= _REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts[grammar] = verdict
        return verdict

    async def _compile(self, grammar: Grammar) -> list[str]:
        try:
            ignored = await self._processes.check(grammar)
        except GrammarError:
            raise
        except Exception:  # says nothing about the grammar
            self._verdicts.pop(grammar, None)
            raise
        if ignored:
            logger.warning("A JSON schema is not enforced in full", extra={"fields": {"ignored": ", ".join(ignored)}})
        return ignored


def _look(verdict: asyncio.Task[list[str]]) -> None:
    """Nobody may be left to hear of a failure; asyncio would complain about that."""
    if not verdict.cancelled():
        verdict.exception()
