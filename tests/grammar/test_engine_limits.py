"""JSON that a model writes is whole when its tokens are used up: scheduler, engine and grammars together."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from legato.grammar.compile import compile_grammar
from legato.grammar.completion import CompletionSearch, JsonTokens
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.scanner import JsonScanner
from legato.grammar.vocabulary import TokenTrie
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import FinishReason, GenerationRequest
from legato.server.grammars import load_trie
from tests.generation import generation, sampling
from tests.grammar.texts import conforms, schema
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 1},
        "address": {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]},
    },
    "required": ["name", "tags"],
}
GRAMMARS = [(schema(PERSON), PERSON), (Grammar(GrammarKind.JSON_OBJECT), {"type": "object"})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def trie(folder: Path, model: CausalModel) -> TokenTrie:
    return load_trie(ModelFiles.open(folder), model.config.vocab_size)


def requests(limits: range) -> list[GenerationRequest]:
    rng = random.Random(1)
    return [
        generation(
            limit * 10 + number,
            [rng.randrange(64, 320) for _ in range(rng.randrange(1, 30))],
            limit,
            parameters=sampling(do_sample=number % 2 == 0, temperature=2.0, seed=limit),
            grammar=grammar,
        )
        for limit in limits
        for number, (grammar, _) in enumerate(GRAMMARS)
    ]


def least(grammar: Grammar, trie: TokenTrie) -> int:
    """Tokens of the shortest document and its end."""
    start = compile_grammar(grammar, trie)
    found = CompletionSearch(grammar, JsonTokens(trie), start).search(start, JsonScanner(), 100, (), greedy=False)
    assert found is not None
    return len(found)


@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempted"])
def test_json_is_whole_at_every_limit_that_suffices(model: CausalModel, trie: TokenTrie, num_blocks: int) -> None:
    server = LocalServer(model, eos=frozenset({EOS}), load_trie=lambda: trie, num_blocks=num_blocks)
    todo = requests(range(2, 60, 3))
    answers = server.run(todo, random.Random(3))
    cut = 0
    for request in todo:
        grammar, wanted = GRAMMARS[request.id % 10]
        reason = server.outputs[request.id][-1].finish_reason
        if request.max_new_tokens < least(grammar, trie):
            cut += reason is FinishReason.LENGTH
            continue
        assert reason is FinishReason.EOS_TOKEN
        text = trie.tokenizer.decode_bytes(answers[request.id][:-1]).decode()
        assert conforms(json.loads(text), wanted), text
    assert cut, "some limits are too small for any document, and those end as ever"


def test_a_text_is_the_same_whether_it_was_preempted_or_not(model: CausalModel, trie: TokenTrie) -> None:
    todo = requests(range(20, 60, 5))
    roomy, cramped = (
        LocalServer(model, eos=frozenset({EOS}), load_trie=lambda: trie, num_blocks=blocks).run(todo)
        for blocks in (256, 14)
    )
    assert roomy == cramped
