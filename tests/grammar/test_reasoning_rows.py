"""Rows that reason: no grammar before the end of it, and an end when the budget is spent."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest

from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.reasoning import RowReasoning
from legato.grammar.vocabulary import TokenTrie
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.server.grammars import Grammars, load_trie
from tests.generation import generation, sampling
from tests.grammar.test_rows import accept, allowed, token
from tests.grammar.texts import EOS, json_tokenizer
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{2}")
END = "</s"
END_IDS = json_tokenizer().encode(END).ids


@pytest.fixture
def grammars(trie: TokenTrie) -> Iterator[Grammars]:
    grammars = Grammars(lambda: trie)
    yield grammars
    grammars.close()


def reasoning(*starts: str, budget: int | None = None) -> RowReasoning:
    starts_ids = [token(start) for start in starts]
    return RowReasoning(pb.Reasoning(start_ids=starts_ids, ends=[END, "never"], forced_ids=END_IDS, budget=budget))


def test_the_grammar_begins_after_the_reasoning(grammars: Grammars) -> None:
    grammars.set_row(0, DIGITS, [], reasoning=reasoning())
    for text in ("x", "<", "/", "s"):
        ids = allowed(grammars, [0])[0]
        assert EOS not in ids and token("z") in ids and token("7") in ids  # the text does not end before it has begun
        accept(grammars, [0], text)
    assert token("7") in allowed(grammars, [0])[0] and EOS not in allowed(grammars, [0])[0]
    accept(grammars, [0], "7")
    accept(grammars, [0], "7")
    assert allowed(grammars, [0]) == {0: [EOS]}


def test_a_row_may_begin_with_reasoning_or_with_its_text(grammars: Grammars) -> None:
    for row, first in enumerate(("x", "7")):
        grammars.set_row(row, DIGITS, [], reasoning=reasoning("x", "y"))
        ids = allowed(grammars, [row])[0]
        assert token("x") in ids and token("7") in ids and token("y") not in ids
        accept(grammars, [row], first)
    masks = allowed(grammars, [0, 1])
    assert masks[0] == [token("y")]
    assert token("x") not in masks[1] and token("7") in masks[1]


def test_a_budget_that_is_spent_forces_the_end(grammars: Grammars) -> None:
    grammars.set_row(0, None, [], reasoning=reasoning(budget=2))
    accept(grammars, [0], "a")
    assert grammars.allowed([0]) is None
    accept(grammars, [0], "b")
    for number, token_id in enumerate(END_IDS):
        assert allowed(grammars, [0]) == {0: [token_id]}, number
        grammars.accept([0], lambda token_id=token_id: [token_id])  # type: ignore[misc]
    assert allowed(grammars, [0]) == {}


def test_tokens_that_come_before_the_row_has_entered_wait_for_it(trie: TokenTrie) -> None:
    """As with the first request of all, for which the vocabulary is still being read."""
    read = Event()

    def slow() -> TokenTrie:
        assert read.wait(10)
        return trie

    grammars = Grammars(slow)
    grammars.set_row(0, None, [], reasoning=reasoning(budget=2))
    for text in ("a", "b"):
        assert grammars.allowed([0]) is None
        accept(grammars, [0], text)
    Timer(0.2, read.set).start()
    assert allowed(grammars, [0]) == {0: END_IDS[:1]}
    grammars.close()


def test_a_row_that_cannot_enter_fails_alone(grammars: Grammars, trie: TokenTrie) -> None:
    broken = reasoning(budget=1)
    broken.accept = None  # type: ignore[method-assign, assignment]
    grammars.set_row(0, None, [token("a")], reasoning=broken)
    grammars.set_row(1, None, [], reasoning=reasoning(budget=1))
    grammars.accept([0, 1], lambda: [token("a"), token("b")])
    assert allowed(grammars, [0, 1]) == {1: END_IDS[:1]}
    assert list(grammars.errors([0, 1])) == [0]


def test_without_anything_to_spend_the_end_comes_first(grammars: Grammars) -> None:
    grammars.set_row(0, None, [], reasoning=reasoning(budget=0))
    assert allowed(grammars, [0]) == {0: END_IDS[:1]}


def test_reasoning_without_grammar_or_budget_is_nobodys_business(grammars: Grammars) -> None:
    grammars.set_row(0, None, [], reasoning=reasoning())
    assert not grammars.active([0])


def test_a_preempted_row_continues_where_it_was(grammars: Grammars) -> None:
    grammars.set_row(0, DIGITS, [token("a")], reasoning=reasoning(budget=2))
    assert token("z") in allowed(grammars, [0])[0]
    grammars.set_row(1, DIGITS, [token("a"), token("b"), *END_IDS, token("4")], reasoning=reasoning(budget=2))
    assert EOS not in allowed(grammars, [1])[0] and token("2") in allowed(grammars, [1])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def test_texts_of_a_model_that_reasons_conform_and_do_not_depend_on_others(folder: Path, model: CausalModel) -> None:
    """Sampled, with two steps in flight, with rows that have neither beside them."""
    trie = load_trie(ModelFiles.open(folder), model.config.vocab_size)
    eos = frozenset(ModelFiles.open(folder).eos_token_ids())
    end_ids = ModelFiles.open(folder).tokenizer().encode("</t>", add_special_tokens=False).ids

    def requests() -> list:  # type: ignore[type-arg]
        made = []
        for i in range(6):
            parameters = sampling(do_sample=True, temperature=1.0, seed=i)
            if i % 3 < 2:
                limits = pb.Reasoning(ends=["</t>"], forced_ids=end_ids, budget=i)
                parameters.reasoning.CopyFrom(limits)
            grammar = Grammar(GrammarKind.REGEX, "(yes|no)") if i % 3 == 0 else None
            made.append(generation(i, [70 + i, 80, 90], 24, parameters=parameters, grammar=grammar))
        return made

    def server() -> LocalServer:
        return LocalServer(model, eos=eos, load_trie=lambda: trie, num_blocks=24, block_size=4)

    together = server().run(requests(), random.Random(3))
    for request in requests():
        if request.id % 3 == 2:
            continue
        tokens = together[request.id]
        text = trie.tokenizer.decode_bytes([each for each in tokens if each not in eos]).decode(errors="replace")
        ended_before = request.id % 3 == 1 and eos & set(tokens[: request.id])
        assert ended_before or tokens[request.id : request.id + len(end_ids)] == end_ids
        if request.id % 3 == 0:
            assert re.search("</t>(yes|no)$", text), text
        if request.id < 2:
            assert together[request.id] == server().run([request])[request.id]
