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
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any, Final

from tokenizers import Tokenizer

from legato.api.errors import Overloaded
from legato.grammar import checker
from legato.grammar.errors import GrammarError, TooComplex
from legato.grammar.kinds import Grammar

logger = logging.getLogger(__name__)

# Seconds after which a process that neither answers nor ends is given up. The limit on its processor time comes first.
_PATIENCE: Final = 5 * checker.SECONDS
# What a process needs of the router's environment: how to find Python's libraries. No secrets.
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")


class CheckerProcess:
    """One process, for one thread at a time."""

    def __init__(self, setup: bytes) -> None:
        """GrammarError if the tokenizer is not one that grammars can use."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            # -P: the folder that the router was started in has no say in what is imported.
            [sys.executable, "-P", "-m", checker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            self._ask(setup)
        except BaseException:
            self.close()
            raise

    def check(self, grammar: Grammar) -> list[str]:
        """What a lenient reading leaves out. GrammarError, after which the process may have ended."""
        answer = self._ask(json.dumps({"kind": grammar.kind.value, "value": grammar.value}).encode())
        warnings: list[str] = answer["warnings"]
        return warnings

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        alarm = Timer(_PATIENCE, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            text = self._process.stdout.readline()
        except BrokenPipeError:
            text = b""
        finally:
            alarm.cancel()
        if not text:
            raise _failure(self._process.wait())
        answer: dict[str, Any] = json.loads(text)
        if answer["error"] is not None:
            raise GrammarError(answer["error"])
        return answer


class CheckerProcesses:
    """A few processes that know the same tokenizer. One more grammar than there are processes waits."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], num_processes: int = 2
    ) -> None:
        self._make_setup: Callable[[], bytes] = lambda: json.dumps(
            {
                "tokenizer": tokenizer.to_str(),
                "tokenizer_size": tokenizer.get_vocab_size(),
                "vocab_size": vocab_size,
                "eos_token_ids": list(eos_token_ids),
            }
        ).encode()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="check-grammar")
        self._idle: deque[CheckerProcess] = deque()

    async def check(self, grammar: Grammar) -> list[str]:
        """What a lenient reading leaves out. GrammarError; Overloaded if none of the processes gets to it."""
        work = self._threads.submit(self._check, grammar)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), _PATIENCE + checker.SECONDS)
        except TimeoutError:
            raise Overloaded from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _check(self, grammar: Grammar) -> list[str]:
        process = self._process()
        try:
            return process.check(grammar)
        finally:
            if process.runs:
                self._idle.append(process)
            else:
                process.close()

    def _process(self) -> CheckerProcess:
        while self._idle:
            process = self._idle.pop()
            if process.runs:
                return process
            process.close()
        return CheckerProcess(self._make_setup())


def _failure(exit_code: int) -> Exception:
    if exit_code == -signal.SIGPROF:
        return TooComplex(f"it takes more than {checker.SECONDS:g} s to compile")
    if exit_code == -signal.SIGABRT:  # how a Rust program ends that gets no memory
        return TooComplex(f"it takes more than {checker.MEMORY >> 20} MB to compile")
    logger.warning("A grammar process is lost", extra={"fields": {"exit_code": exit_code}})
    if exit_code == -signal.SIGKILL:  # by our own alarm, or for want of memory elsewhere
        return Overloaded()
    return TooComplex("it breaks the compiler")
