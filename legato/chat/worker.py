"""A template process (`ipc/confined.py`): renders conversations within limits that the kernel keeps.

Jinja has a hundred ways to ask for too much, so templates run here. Memory runs out as a
`MemoryError`; there are no files, sockets or children to be had.

Towards the process conversations are marshalled Python, which is fast and exact and can hold nothing but plain data.
Back come only text and JSON: a process that ran an untrusted template is trusted with nothing else.
"""

from __future__ import annotations

import json
import marshal
import resource
import time
from functools import partial
from importlib import import_module
from typing import Final

from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

from legato.chat import RenderedKind
from legato.chat.content import UnfitContent
from legato.chat.rendering import BadConversation, Conversation, Renderer
from legato.ipc.confined import Answer, Respond, cpu_limit

# What Jinja and Python import when they first need it. By then no file can be opened.
_IMPORTED_EARLY: Final = ("jinja2.constants", "jinja2.debug", "encodings.unicode_escape", "html", "pprint", "textwrap")
# Characters of a sentence that a template may have made as long as it likes.
_MAX_MESSAGE: Final = 1000


def start(setup: bytes) -> tuple[Answer, Respond]:
    settings = marshal.loads(setup)
    _confine(settings["memory"])
    with cpu_limit(settings["seconds"]):
        renderer = Renderer(settings["templates"], settings["special_tokens"], settings["output"])
    return (RenderedKind.FACTS, json.dumps(renderer.facts).encode()), partial(_render, renderer)


def _confine(memory: int) -> None:
    for module in _IMPORTED_EARLY:
        import_module(module)
    time.localtime()  # reads the time zone
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _render(renderer: Renderer, request: bytes) -> Answer:
    try:
        prompt = renderer.render(Conversation(**marshal.loads(request)))
        return RenderedKind.PROMPT, prompt.encode(errors="surrogatepass")
    except Exception as error:
        kind = RenderedKind.MISSING_VARIABLE if isinstance(error, UndefinedError) else RenderedKind.ERROR
        return kind, _describe(error)[:_MAX_MESSAGE].encode(errors="replace")


def _describe(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"{error.message} (line {error.lineno} of the chat template)"
    if isinstance(error, MemoryError):
        return "the chat template needs too much memory"
    if isinstance(error, RecursionError):
        return "the chat template or the messages are nested too deeply"
    if isinstance(error, (TemplateError, BadConversation, UnfitContent)):
        return str(error)
    return f"{type(error).__name__}: {error}"
