"""Drafts change how many steps a text takes, and nothing else: every token, logprob and likely token is the same."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.vocabulary import TokenTrie
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest, Output
from legato.server.grammars import load_trie
from tests.generation import generation, sampling
from tests.grammar.texts import schema
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

EOS = 2
NUM_TOKENS = 48
# `make drafts` has 10,000, many at once.
NUM_REQUESTS = int(os.environ.get("DRAFT_REQUESTS", "35"))
ROOM, RATE = ({"max_rows": 64, "num_blocks": 1024}, 0.7) if NUM_REQUESTS > 1000 else ({}, 0.2)
JSON = schema({"type": "array", "items": {"enum": ["abc", "abd", "xyz"]}, "minItems": 6, "maxItems": 9})
WORDS = Grammar(GrammarKind.REGEX, "((ab|cd)-){3,9}end")
# What requests ask for, by turns. Low temperatures repeat themselves, so that some drafts are right.
KINDS: list[dict[str, object]] = [
    {},
    {"do_sample": True, "temperature": 0.3},
    {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.05},
    {"frequency_penalty": 0.2, "presence_penalty": 0.1},
    {"do_sample": True, "temperature": 0.4, "top_p": 0.8, "watermark": True},
    {"min_new_tokens": 30, "end_token_ids": [EOS], "logit_bias": {EOS: 4.0}},
    {"do_sample": True, "temperature": 0.4, "typical_p": 0.7, "min_p": 0.05, "logit_bias": {5: 2.0, 9: -50.0}},
]
GRAMMARS = [None, None, JSON, None, WORDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def trie(folder: Path, model: CausalModel) -> TokenTrie:
    return load_trie(ModelFiles.open(folder), model.config.vocab_size)


def requests(count: int, seed: int) -> list[GenerationRequest]:
    rng = random.Random(seed)
    return [
        generation(
            i,
            [rng.randrange(64, 320) for _ in range(rng.randrange(2, 12))] * rng.randrange(1, 5),
            rng.randrange(2, NUM_TOKENS),
            sampling(seed=seed * 1000 + i, **KINDS[i % len(KINDS)]),
            ignore_eos=i % 3 == 0,
            grammar=GRAMMARS[i % len(GRAMMARS)],
            top_n_tokens=i % 4,
            prompt_logprobs=i % 6 == 0,
        )
        for i in range(count)
    ]


def seen(outputs: list[Output]) -> list[tuple[object, ...]]:
    """Everything that a client gets to see. Logprobs come from matrix products of other shapes: to a thousandth."""
    return [
        (
            output.token_id,
            pytest.approx(output.logprob, abs=1e-3),
            [token for token, _ in output.top_tokens or ()],
            output.finish_reason,
            len(output.prompt_logprobs or ()),
        )
        for output in outputs
    ]


def answers(
    model: CausalModel, trie: TokenTrie, count: int, seed: int, speculate: int, **settings: int
) -> tuple[dict[int, list[tuple[object, ...]]], int]:
    """By request, and how many of the tokens were drafts."""
    server = LocalServer(
        model, eos=frozenset({EOS}), load_trie=lambda: trie, speculate=speculate, **{**ROOM, **settings}
    )  # fmt: skip
    server.run(requests(count, seed), random.Random(seed), RATE)
    num_drafts = sum(output.is_draft for outputs in server.outputs.values() for output in outputs)
    return {number: seen(outputs) for number, outputs in server.outputs.items()}, num_drafts


def test_what_a_grammar_forces_is_drafted(model: CausalModel, trie: TokenTrie) -> None:
    """Names of properties are not guessed from any text: there is none yet."""
    names = ["temperature_in_kelvin", "atmospheric_pressure", "wind_direction"]
    properties = {name: {"enum": [1, 2, 3]} for name in names}
    weather = schema({"type": "object", "properties": properties, "required": names, "additionalProperties": False})
    request = generation(1, [70, 80, 90], 120, sampling(do_sample=True, temperature=0.5, seed=3), grammar=weather)
    texts = []
    for speculate in (0, 8):
        server = LocalServer(model, eos=frozenset({EOS}), load_trie=lambda: trie, speculate=speculate)
        server.run([request])
        texts.append(seen(server.outputs[1]))
    assert texts[0] == texts[1]
    num_drafts = sum(output.is_draft for output in server.outputs[1])
    assert num_drafts > 0.6 * sum(map(len, names)), "a letter is a token here"


@pytest.mark.parametrize(("speculate", "settings"), [(1, {}), (5, {}), (16, {"num_blocks": 24, "max_rows": 6})])
def test_texts_are_the_same_with_and_without_drafts(
    model: CausalModel, trie: TokenTrie, speculate: int, settings: dict[str, int]
) -> None:
    """Also where memory is scarce, and requests are preempted."""
    expected, none = answers(model, trie, NUM_REQUESTS, 7, 0)
    found, num_drafts = answers(model, trie, NUM_REQUESTS, 7, speculate, **settings)
    assert (none, num_drafts > 1.4 * NUM_REQUESTS) == (0, True)
    different = [number for number in expected if found[number] != expected[number]]
    assert not different, f"{len(different)} of {NUM_REQUESTS} texts are not the same: requests {different[:10]}"
