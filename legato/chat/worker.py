"""A template process: renders conversations for the router, within limits that the kernel keeps.

Threads cannot be stopped and Jinja has a hundred ways to ask for too much, so what somebody's template does happens
here. The timer's signal ends the process wherever it is, in C code too; memory runs out as a `MemoryError`. There are
no files, sockets or children to be had, and none of the router's environment.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

from legato.chat.content import UnfitContent
from legato.chat.frames import FrameError, Kind, receive, send
from legato.chat.rendering import BadConversation, Conversation, Renderer

# What Jinja and Python import when they first need it. By then no file can be opened.
IMPORTED_EARLY = ("jinja2.constants", "jinja2.debug", "encodings.unicode_escape", "html", "pprint", "textwrap")
# What the router sends is of its own making.
ANY_LENGTH = sys.maxsize
# Of a sentence that a template may have made as long as it likes.
MAX_MESSAGE = 1000


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the router, which may still have requests to finish
    router = socket.socket(fileno=sys.stdin.fileno())
    with suppress(FrameError):  # the router is gone
        serve(router)


def serve(router: socket.socket) -> None:
    setup = marshal.loads(receive(router, ANY_LENGTH)[1])
    confine(setup["memory"])
    with cpu_limit(setup["seconds"]):
        renderer = Renderer(setup["templates"], setup["special_tokens"], setup["output"])
    send(router, Kind.FACTS, json.dumps(renderer.facts).encode())
    while True:
        _, request = receive(router, ANY_LENGTH)
        with cpu_limit(setup["seconds"]):
            kind, body = answer(renderer, request)
        send(router, kind, body)


def confine(memory: int) -> None:
    for module in IMPORTED_EARLY:
        import_module(module)
    time.localtime()  # reads the time zone
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Processor time, so that a busy machine makes nobody late. Nothing handles the signal: it ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(renderer: Renderer, request: bytes) -> tuple[Kind, bytes]:
    try:
        prompt = renderer.render(Conversation(**marshal.loads(request)))
        return Kind.TEXT, prompt.encode(errors="surrogatepass")
    except Exception as error:
        kind = Kind.MISSING if isinstance(error, UndefinedError) else Kind.ERROR
        return kind, describe(error)[:MAX_MESSAGE].encode(errors="replace")


def describe(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"{error.message} (line {error.lineno} of the chat template)"
    if isinstance(error, MemoryError):
        return "the chat template needs too much memory"
    if isinstance(error, RecursionError):
        return "the chat template or the messages are nested too deeply"
    if isinstance(error, (TemplateError, BadConversation, UnfitContent)):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
