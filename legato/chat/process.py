"""The router's side of its template processes (`chat_worker.py`).

A process starts with the templates compiled and answers one conversation at a time. When it breaks a limit it ends,
the conversation is answered with an error, and the next one gets a new process.
"""

from __future__ import annotations

import logging
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from legato.chat.frames import FrameError, Kind, receive, send

logger = logging.getLogger(__name__)

# Seconds after which a process that neither answers nor ends is given up. The limit on its processor time comes first.
PATIENCE = 10.0
# What a process needs of the router's environment: how to find Python's libraries, and the time zone. No secrets.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")


@dataclass(frozen=True, slots=True)
class RenderLimits:
    # Of processor time.
    seconds: float = 0.8
    # Characters of the prompt.
    output: int = 4_000_000
    # Bytes, the interpreter's own included.
    memory: int = 256 << 20

    @classmethod
    def for_payload(cls, num_bytes: int) -> RenderLimits:
        """Enough for any conversation of that many bytes, which Python may keep in thirty times as many."""
        return cls(output=2 * num_bytes, memory=max(cls().memory, 100 * num_bytes))


class Facts(msgspec.Struct, frozen=True):
    """What a process found out about its templates."""

    mentions_tools: bool = False
    tool_arguments: Literal["object", "string"] = "object"


class ProcessEnded(Exception):
    """It broke a limit. The message says which."""


class TemplateProcess:
    """One process, ready to render."""

    def __init__(self, setup: bytes, limits: RenderLimits) -> None:
        self._limits = limits
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(PATIENCE)
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                # -P: the folder that the router was started in has no say in what is imported.
                [sys.executable, "-P", "-m", "legato.chat.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self.facts = msgspec.json.decode(self._ask(Kind.SETUP, setup)[1], type=Facts)

    def render(self, request: bytes) -> tuple[Kind, bytes]:
        return self._ask(Kind.RENDER, request)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, kind: Kind, body: bytes) -> tuple[Kind, bytes]:
        try:
            send(self._connection, kind, body)
            return receive(self._connection, most=4 * self._limits.output)
        except FrameError as error:
            self.close()
            raise ProcessEnded(self._reason(error)) from None

    def _reason(self, error: FrameError) -> str:
        if self._process.returncode == -signal.SIGPROF:
            return f"the chat template takes more than {self._limits.seconds:g} s"
        logger.warning(
            "A template process is lost",
            extra={"fields": {"exit_code": self._process.returncode, "cause": str(error)}},
        )
        return "the chat template broke the process that renders it"


class TemplateProcesses:
    """A few processes that know the same templates. Threads may render at once; one more than there are waits."""

    def __init__(
        self, templates: dict[str, str], special_tokens: dict[str, str], limits: RenderLimits, most: int = 2
    ) -> None:
        self._limits = limits
        self._setup = marshal.dumps(
            {
                "templates": templates,
                "special_tokens": special_tokens,
                "seconds": limits.seconds,
                "output": limits.output,
                "memory": limits.memory,
            }
        )
        self._free = threading.BoundedSemaphore(most)
        self._idle: deque[TemplateProcess] = deque()

    def start(self) -> Facts:
        """Starts the first process, the others when they are needed."""
        process = TemplateProcess(self._setup, self._limits)
        self._idle.append(process)
        return process.facts

    def render(self, conversation: dict[str, Any]) -> tuple[Kind, bytes]:
        # Version 2 writes an object as often as it occurs. Later ones refer back, and a change to one message in the
        # process would be a change to its double.
        request = marshal.dumps(conversation, 2)
        with self._free:
            try:
                process = self._idle.pop()
            except IndexError:
                process = TemplateProcess(self._setup, self._limits)
            answer = process.render(request)
            self._idle.append(process)
            return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
