"""Checks the grammars of requests before they are scheduled: a grammar is refused with a reason, or prepared.

read_grammar       what the client wrote                                           (shapes.py)
GrammarCompiler    compiles it once, and has the shards compile it, so that no step waits for that
GrammarChecks      ... within limits, in processes that the kernel stops           (grammar/checker.py)
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tokenizers import Tokenizer

from legato.api.errors import GenerationFailed, InvalidRequest, Overloaded
from legato.common.errors import LegatoError
from legato.grammar import checker
from legato.grammar.compile import check_size, lenient
from legato.grammar.errors import GrammarError, TooComplex
from legato.grammar.kinds import Grammar
from legato.ipc.confined import ConfinedPool, Confinement, ProcessEnded
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import ModelLimits

logger = logging.getLogger(__name__)

# Grammars whose verdict is remembered.
_REMEMBERED: Final = 256
# Seconds after which a process that neither answers nor ends is given up.
_PATIENCE: Final = 5 * checker.SECONDS
_MAX_ANSWER: Final = 16 << 20


class GrammarChecks:
    """In processes that start with the first grammar. One more grammar than there are processes waits."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], num_processes: int = 2
    ) -> None:
        def setup() -> bytes:
            size = tokenizer.get_vocab_size()
            return json.dumps([tokenizer.to_str(), size, vocab_size, list(eos_token_ids)]).encode()

        self.processes = ConfinedPool(
            Confinement(checker.__name__, checker.SECONDS, _PATIENCE, _MAX_ANSWER), setup, num_processes
        )
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="check-grammar")

    async def check(self, grammar: Grammar) -> list[str]:
        """What a lenient reading leaves out. GrammarError; Overloaded if none of the processes gets to it."""
        request = json.dumps({"kind": grammar.kind.value, "value": grammar.value}).encode()
        answer = asyncio.get_running_loop().run_in_executor(self._threads, self.processes.ask, request)
        try:
            kind, body = await asyncio.wait_for(answer, _PATIENCE + checker.SECONDS)
        except TimeoutError:
            raise Overloaded from None
        except ProcessEnded as ended:
            raise _failure(ended) from None
        if kind == checker.REFUSED:
            raise GrammarError(body.decode())
        ignored: list[str] = json.loads(body)
        return ignored

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.processes.close()


def _failure(ended: ProcessEnded) -> Exception:
    if ended.exit_code == -signal.SIGPROF:
        return TooComplex(f"it takes more than {checker.SECONDS:g} s to compile")
    if ended.exit_code == -signal.SIGABRT:  # how a Rust program ends that gets no memory
        return TooComplex(f"it takes more than {checker.MEMORY >> 20} MB to compile")
    logger.warning("A grammar process ended", extra={"fields": {"cause": str(ended)}})
    if ended.exit_code == -signal.SIGKILL:  # by us, because it did not answer, or for want of memory elsewhere
        return Overloaded()
    return TooComplex("the compiler crashes on it")


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
        self._checks = GrammarChecks(tokenizer, limits.vocab_size, sorted(limits.eos_token_ids))
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
        self._checks.close()

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
            ignored = await self._checks.check(grammar)
        except GrammarError:
            raise
        except Exception:  # says nothing about the grammar
            self._verdicts.pop(grammar, None)
            raise
        if ignored:
            logger.warning("A JSON schema is not enforced in full", extra={"fields": {"ignored": ", ".join(ignored)}})
        return ignored


def _look(verdict: asyncio.Task[list[str]]) -> None:
    """Retrieve the exception: asyncio warns about failures that nobody awaits."""
    if not verdict.cancelled():
        verdict.exception()
