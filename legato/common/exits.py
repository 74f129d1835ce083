"""What is said about the end of a process: the name of a signal, and last lines on stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn, TextIO

PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 40` for one of those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(*lines: str) -> None:
    """On stderr. Whether anybody reads it must not change what happens next."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """The reader of a stream is gone: the interpreter must not fail when it flushes the stream at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())


def exit_now(reason: str, code: int = 1) -> NoReturn:
    """Without the ordinary exit, which would wait for threads that may never end."""
    with suppress(OSError, ValueError):
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stdout.flush()
    report(f"error: {reason}")
    os._exit(code)


def end_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends, whatever state this one is in."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_standard_streams() -> None:
    """Those that this process was started without lead to nowhere. Otherwise a socket may get the number of one, and
    what is written there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
