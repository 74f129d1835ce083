"""The router's side of the processes that check grammars (`legato/grammar/checker.py`).

A process starts when the first grammar comes and answers one at a time. When a grammar breaks a limit the process ends,
the grammar is refused, and the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from legato.grammar import checker
from legato.grammar.errors import GrammarError, TooComplex
from legato.grammar.kinds import Grammar
from legato.router.errors import Overloaded

logger = logging.getLogger(__name__)

# Seconds after which a process that neither answers nor ends is given up. The limit on its processor time comes first.
_PATIENCE: Final = 5 * checker.SECONDS
# What a process needs of the router's environment: how to find Python's libraries. No secrets.
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")


class CheckerProcess:
    """One process. Asked by one task at a time, which must not be cancelled while it waits."""

    def __init__(self, make_setup: Callable[[], bytes]) -> None:
        self._make_setup = make_setup
        self._process: Process | None = None

    async def check(self, grammar: Grammar) -> list[str]:
        """What a lenient reading leaves out; raises GrammarError."""
        if self._process is None or self._process.returncode is not None:
            await self._begin()
        answer = await self._ask(json.dumps({"kind": grammar.kind.value, "value": grammar.value}).encode())
        warnings: list[str] = answer["warnings"]
        return warnings

    async def _begin(self) -> None:
        self._process = await _start()
        try:
            await self._ask(self._make_setup())
        except GrammarError:  # the tokenizer is not one that grammars can use
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _ask(self, line: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._exchange(line)
        except (TimeoutError, OSError) as error:
            logger.warning("A grammar process is lost", extra={"fields": {"cause": repr(error)}})
            self.close()
            raise Overloaded from None  # not for want of its own processor time, or it would have ended
        if answer["error"] is not None:
            raise GrammarError(answer["error"])
        return answer

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(line + b"\n")
        await process.stdin.drain()
        if text := await process.stdout.readline():
            answer: dict[str, Any] = json.loads(text)
            return answer
        exit_code = await process.wait()
        self._process = None
        raise TooComplex(_reason(exit_code))


class CheckerProcesses:
    """A few processes that know the same tokenizer. One more grammar than there are processes waits."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], num_processes: int = 2
    ) -> None:
        def setup() -> bytes:
            facts = {
                "tokenizer": tokenizer.to_str(),
                "tokenizer_size": tokenizer.get_vocab_size(),
                "vocab_size": vocab_size,
                "eos_token_ids": list(eos_token_ids),
            }
            return json.dumps(facts).encode()

        self._all = [CheckerProcess(setup) for _ in range(num_processes)]
        self._idle: asyncio.LifoQueue[CheckerProcess] = asyncio.LifoQueue()
        for process in reversed(self._all):
            self._idle.put_nowait(process)

    async def check(self, grammar: Grammar) -> list[str]:
        try:
            async with asyncio.timeout(_PATIENCE):
                process = await self._idle.get()
        except TimeoutError:
            raise Overloaded from None
        try:
            return await process.check(grammar)
        finally:
            self._idle.put_nowait(process)

    def close(self) -> None:
        for process in self._all:
            process.close()


async def _start() -> Process:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # -P: the folder that the router was started in has no say in what is imported.
    command = [sys.executable, "-P", "-m", checker.__name__]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)


def _reason(exit_code: int) -> str:
    if exit_code == -signal.SIGPROF:
        return f"it takes more than {checker.SECONDS:g} s to compile"
    if exit_code == -signal.SIGABRT:  # how a Rust program ends that gets no memory
        return f"it takes more than {checker.MEMORY >> 20} MB to compile"
    logger.warning("A grammar process is lost", extra={"fields": {"exit_code": exit_code}})
    return "it breaks the compiler"
