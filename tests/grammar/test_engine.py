"""Scheduler, engine and grammars together: constrained texts conform, whatever happens around them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.vocabulary import TokenTrie
from legato.grammar.wire import from_pb
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.router.shards import _from_pb, _to_pb
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.server.grammars import load_trie
from tests.generation import generation, parameters_of, sampling
from tests.grammar.texts import conforms, schema
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

EOS = 2
MOST = 120
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOUR = "(red|green|#[0-9a-f]{6})"
KINDS = [
    schema(PERSON),
    Grammar(GrammarKind.REGEX, COLOUR),
    Grammar(GrammarKind.CHOICE, '["yes", "no"]'),
    Grammar(GrammarKind.LARK, 'start: "<" /[a-z]{1,5}/ ">"'),
    None,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def trie(folder: Path, model: CausalModel) -> TokenTrie:
    return load_trie(ModelFiles.open(folder), model.config.vocab_size)


def requests() -> list[GenerationRequest]:
    """Of every kind, greedy and sampled."""
    rng = random.Random(2)
    return [
        generation(
            i,
            [rng.randrange(64, 320) for _ in range(rng.randrange(1, 40))],
            MOST if KINDS[i % len(KINDS)] else 40,
            parameters=sampling(do_sample=i % 2 == 0, temperature=1.5, seed=i, repetition_penalty=1.0 + (i % 3) / 2),
            grammar=KINDS[i % len(KINDS)],
        )
        for i in range(15)
    ]


def server(model: CausalModel, trie: TokenTrie, **settings: object) -> LocalServer:
    return LocalServer(model, eos=frozenset({EOS}), load_trie=lambda: trie, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(model: CausalModel, trie: TokenTrie) -> dict[int, list[int]]:
    return {each.id: server(model, trie).run([each])[each.id] for each in requests()}


def text_of(tokens: list[int], trie: TokenTrie) -> str:
    assert tokens[-1] == EOS
    return trie.tokenizer.decode_bytes(tokens[:-1]).decode()


def test_every_text_conforms_to_its_grammar(model: CausalModel, trie: TokenTrie) -> None:
    engine = server(model, trie)
    answers = engine.run(requests(), random.Random(4))
    for request in requests():
        grammar = from_pb(parameters_of(request))
        if grammar is None:
            continue
        text = text_of(answers[request.id], trie)
        assert engine.outputs[request.id][-1].finish_reason is FinishReason.EOS_TOKEN
        kind = grammar.kind
        if kind is GrammarKind.JSON_SCHEMA:
            assert conforms(json.loads(text), PERSON), text
        elif kind is GrammarKind.REGEX:
            assert re.fullmatch(COLOUR, text), text
        elif kind is GrammarKind.CHOICE:
            assert text in ("yes", "no")
        else:
            assert re.fullmatch("<[a-z]{1,5}>", text), text


@pytest.mark.parametrize("seed", [1, 2])
def test_a_text_is_the_same_whatever_runs_beside_it(
    model: CausalModel, trie: TokenTrie, alone: dict[int, list[int]], seed: int
) -> None:
    assert server(model, trie).run(requests(), random.Random(seed)) == alone


def test_a_text_is_the_same_in_small_chunks(model: CausalModel, trie: TokenTrie, alone: dict[int, list[int]]) -> None:
    small = server(model, trie, step_tokens=5, max_rows=5, prefix_caching=False)
    assert small.run(requests(), random.Random(3)) == alone


def test_a_text_is_the_same_after_preemptions(model: CausalModel, trie: TokenTrie, alone: dict[int, list[int]]) -> None:
    crowded = server(model, trie, num_blocks=44, block_size=4, prefix_caching=False)
    assert crowded.run(requests()) == alone
    assert crowded.scheduler.stats.preemptions > 0


def test_a_grammar_that_fails_ends_its_own_request_with_an_error(
    model: CausalModel, trie: TokenTrie, alone: dict[int, list[int]]
) -> None:
    """The router refuses such a grammar. Should one get through, nobody else notices."""
    engine = server(model, trie)
    bad = generation(99, [70, 71], 20, grammar=schema({"type": "array", "uniqueItems": True}))
    outputs: dict[int, list[Output]] = {}
    for request in [bad, *requests()]:
        engine.scheduler.submit(request)
        outputs[request.id] = []
    waiting = []
    while True:
        while engine.scheduler.num_in_flight < 2 and (plan := engine.scheduler.plan()) is not None:
            waiting.append(engine.engine.launch(_to_pb(plan)))
        if not waiting:
            break
        for request_id, output in engine.scheduler.complete(_from_pb(waiting.pop(0).read())):
            outputs[request_id].append(output)
    (failed,) = outputs.pop(99)
    assert failed.error is not None and "`uniqueItems`" in failed.error
    assert {request_id: [output.token_id for output in each] for request_id, each in outputs.items()} == alone
