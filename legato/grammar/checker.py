"""A process that checks grammars for the router, within limits that the kernel keeps.

llguidance counts most of its work but not all of it: a schema of sixty bytes (`multipleOf` a large prime) can keep it
busy for hours, and a thread cannot be stopped. A process can. The timer's signal ends it wherever it is; memory that
it may not have ends it, too. The router starts another one and refuses the grammar.

Lines of JSON, one answer for each:

    router ──► {"tokenizer": ..., "tokenizer_size": ..., "vocab_size": ..., "eos_token_ids": [...]}, once
           ──► {"kind": ..., "value": ...} for each grammar
           ◄── {"error": ... or null, "warnings": [...]}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, Final

from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.matcher import MaskWriter
from legato.grammar.rehearsal import rehearse
from legato.grammar.vocabulary import TokenTrie

# Of processor time for one grammar. Real ones take milliseconds.
SECONDS: Final = 2.0
# Bytes beyond what the process has when it is ready. A shard keeps some grammars, each as large as it is here.
MEMORY: Final = 64 << 20


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the router, which may still have requests to finish
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until the router is gone."""
    setup = json.loads(questions.readline() or "{}")
    if not setup:
        return
    try:
        trie = TokenTrie(setup["tokenizer"], setup["tokenizer_size"], setup["vocab_size"], setup["eos_token_ids"])
    except GrammarError as error:
        _say(answers, {"error": str(error)})
        return
    writer = MaskWriter(trie, num_threads=1)
    trie.number_parts  # noqa: B018 - made now, within no limit
    _limit_memory()
    _say(answers, {"error": None})
    while line := questions.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # nothing handles its signal, so that ends the process
        answer = _check(json.loads(line), trie, writer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answers, answer)


def _check(question: dict[str, str], trie: TokenTrie, writer: MaskWriter) -> dict[str, Any]:
    try:
        grammar = Grammar(GrammarKind(question["kind"]), question["value"])
        return {"error": None, "warnings": rehearse(grammar, trie, writer)}
    except GrammarError as error:
        return {"error": str(error), "warnings": []}


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        data_pages = int(statm.read().split()[5])
    limit = data_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
