"""A process that checks grammars (`ipc/confined.py`), within limits that the kernel keeps.

llguidance counts most of its work but not all of it: a schema of sixty bytes (`multipleOf` a large prime) can keep it
busy for hours.

The setup is the JSON of what makes a `TokenTrie`, a request {"kind": ..., "value": ...}, an answer the problem or the
JSON of what a lenient reading ignores.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from typing import Final

from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter
from legato.grammar.rehearsal import rehearse
from legato.grammar.vocabulary import TokenTrie

# Of processor time for one grammar. Real ones take milliseconds.
SECONDS: Final = 2.0
# Bytes beyond what the process has when it is ready. A shard keeps some grammars, each as large as it is here.
MEMORY: Final = 64 << 20
# Kinds of answers.
FINE, REFUSED = 1, 2


def start(setup: bytes) -> tuple[tuple[int, bytes], Callable[[bytes], tuple[int, bytes]]]:
    try:
        trie = TokenTrie(*json.loads(setup))
    except GrammarError as error:
        refusal = REFUSED, str(error).encode()
        return refusal, lambda _: refusal
    writer = MaskWriter(trie, num_threads=1)
    trie.number_parts  # noqa: B018 - made now, within no limit
    _limit_memory()
    return (FINE, b""), lambda request: _check(request, trie, writer)


def _check(request: bytes, trie: TokenTrie, writer: MaskWriter) -> tuple[int, bytes]:
    question = json.loads(request)
    try:
        ignored = rehearse(Grammar(GrammarKind(question["kind"]), question["value"]), trie, writer)
        return FINE, json.dumps(ignored).encode()
    except GrammarError as error:
        return REFUSED, str(error).encode(errors="replace")


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        data_pages = int(statm.read().split()[5])
    limit = data_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
