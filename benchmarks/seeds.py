"""Whether a seed gives the same text alone and in a crowd.

    python -m benchmarks.seeds                                     the default model, 200 prompts
    python -m benchmarks.seeds --prompts 20 -- --dtype float32     other options of the launcher after --

Sends every prompt with its own seed twice: once while nothing else runs, once while 15 others do. Prompts have between
a few and some hundred tokens, so that they meet in every mixture of prompts and decodes. Exits with 1 if a single text
differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

from benchmarks.mixed_load import Reply, ask
from benchmarks.processes import launched, leave_nothing_behind
from legato.benchmark.report import environment, write_json
from legato.modelfiles.shapes import write_shape

CROWD = 16
LONGEST_PROMPT, SHOWN = 240, 5


@dataclass(frozen=True)
class SeededPrompt:
    text: str
    seed: int
    new_tokens: int

    @property
    def request(self) -> tuple[str, dict[str, Any]]:
        parameters = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": self.seed}
        return "/generate_stream", {
            "inputs": self.text,
            "parameters": {**parameters, "max_new_tokens": self.new_tokens, "ignore_eos": True},
        }


def prompts(count: int, new_tokens: int) -> list[SeededPrompt]:
    """The beginnings of passages of Python's language reference, each of another length."""
    rng = random.Random(count)
    words = " ".join(topics.topics.values()).split()
    found = []
    for seed in range(1, count + 1):
        first = rng.randrange(len(words) - LONGEST_PROMPT)
        text = " ".join(words[first : first + rng.randint(4, LONGEST_PROMPT)])
        found.append(SeededPrompt(text, seed, rng.randint(new_tokens // 2, new_tokens)))
    return found


def differences(alone: Sequence[Reply], crowded: Sequence[Reply]) -> list[dict[str, Any]]:
    """Number, both texts, and how many characters they begin with in common."""
    found = []
    for number, (first, second) in enumerate(zip(alone, crowded, strict=True)):
        if first != second:
            texts = ["".join(reply.texts) for reply in (first, second)]
            common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            found.append({"prompt": number, "alone": texts[0], "in_a_crowd": texts[1], "common_characters": common})
    return found


def send(port: int, asked: Sequence[SeededPrompt], at_once: int) -> list[Reply]:
    with ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(lambda each: ask(port, *each.request), asked))
    if failed := [reply for reply in replies if not reply.texts]:
        sys.exit(f"error: {len(failed)} requests were not answered: {failed[0]}")
    return replies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48, help="of the longest answer")
    parser.add_argument("--model-id", help="default: that of the launcher")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape with made-up weights instead of a model")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("extra", nargs="*", help="more options of the launcher, after --")
    given = parser.parse_args()
    asked = prompts(given.prompts, given.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = [f"--model-id={given.model_id}"] if given.model_id else []
        if given.tiny:
            model = [f"--model-id={write_shape('tiny', Path(folder) / 'tiny')}", "--load-format=dummy"]
        with launched("--logger-level=error", *model, *given.extra) as (port, _):
            alone = send(port, asked, 1)
            crowded = send(port, asked, CROWD)
    found = differences(alone, crowded)
    print(f"{len(asked) - len(found)} of {len(asked)} texts are the same alone and among {CROWD - 1} others")
    for each in found[:SHOWN]:
        print(json.dumps(each))
    report = {"prompts": len(asked), "same": len(asked) - len(found), "differences": found}
    write_json(given.json, {**environment(), "launcher_options": given.extra, **report})
    return 1 if found else 0


if __name__ == "__main__":
    leave_nothing_behind()
    sys.exit(main())
