"""Grammars of requests: what the client writes, what is refused, and what is done once for many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from legato.api.errors import GenerationFailed, InvalidRequest
from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.wire import from_pb, grammar_type
from legato.http.grammar import GrammarCompiler
from legato.http.shapes import read_grammar
from legato.ipc.settings import RouterSettings
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import ModelLimits
from tests.grammar.texts import EOS, json_tokenizer, schema

T = TypeVar("T")
LIMITS = ModelLimits(64, 100, 1000, json_tokenizer().get_vocab_size(), eos_token_ids=frozenset({EOS}))
SETTINGS = RouterSettings(model_id="test")
UNIQUE = {"type": "array", "uniqueItems": True}


class Shards:
    """Remembers what was prepared."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.prepared: list[Grammar] = []
        self.failure = failure

    async def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)
        if self.failure is not None:
            raise self.failure


def run(
    work: Callable[[GrammarCompiler], Awaitable[T]], shards: Shards | None = None, settings: RouterSettings = SETTINGS
) -> T:
    async def main() -> T:
        compiler = GrammarCompiler(json_tokenizer(), LIMITS, settings, (shards or Shards()).prepare)
        try:
            return await work(compiler)
        finally:
            compiler.close()

    return asyncio.run(main())


def refusal(grammar: Grammar, shards: Shards | None = None, settings: RouterSettings = SETTINGS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        run(lambda compiler: compiler.check(grammar, "response_format"), shards, settings)
    return refused.value


def test_a_grammar_that_compiles_is_prepared_by_the_shards() -> None:
    shards, grammar = Shards(), Grammar(GrammarKind.REGEX, "a+")
    assert run(lambda compiler: compiler.check(grammar), shards) == grammar
    assert shards.prepared == [grammar]


def test_a_refusal_names_the_keyword_and_the_field() -> None:
    shards = Shards()
    error = refusal(schema(UNIQUE), shards)
    assert str(error).startswith("Input validation error: grammar is not valid: the JSON schema keyword `uniqueItems`")
    assert "--schema-lenient" in str(error)
    assert (error.status, error.param) == (422, "response_format")
    assert shards.prepared == [], "nothing that is refused reaches a shard"


def test_with_schema_lenient_the_keyword_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shards = Shards()
    followed = run(lambda compiler: compiler.check(schema(UNIQUE)), shards, replace(SETTINGS, schema_lenient=True))
    assert json.loads(followed.value)["x-guidance"] == {"lenient": True}
    assert shards.prepared == [followed], "shards read it as the router did"
    assert [record.fields for record in caplog.records] == [{"ignored": "`uniqueItems`"}]  # type: ignore[attr-defined]


def test_without_grammar_support_every_grammar_is_refused() -> None:
    error = refusal(Grammar(GrammarKind.REGEX, "a"), settings=replace(SETTINGS, grammar_support=False))
    assert error.problem == "grammar is not supported"


def test_what_only_a_shard_refuses_is_the_clients_fault_too() -> None:
    assert "too many" in str(refusal(Grammar(GrammarKind.REGEX, "a"), Shards(GrammarError("too many"))))


def test_a_lost_shard_is_not_the_clients_fault() -> None:
    with pytest.raises(GenerationFailed):
        run(lambda compiler: compiler.check(Grammar(GrammarKind.REGEX, "a")), Shards(LegatoError("gone")))


def test_one_grammar_of_many_requests_is_compiled_once() -> None:
    async def work(compiler: GrammarCompiler) -> int:
        checks = 0
        check = compiler._checks.check

        async def counted(grammar: Grammar) -> list[str]:
            nonlocal checks
            checks += 1
            return await check(grammar)

        compiler._checks.check = counted  # type: ignore[method-assign]
        for _ in range(2):
            await asyncio.gather(*(compiler.check(Grammar(GrammarKind.REGEX, "a")) for _ in range(16)))
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await compiler.check(Grammar(GrammarKind.REGEX, "("))
        return checks

    assert run(work) == 2


def test_a_client_that_leaves_takes_nobodys_verdict_along() -> None:
    async def work(compiler: GrammarCompiler) -> Grammar:
        grammar = Grammar(GrammarKind.REGEX, "a")
        leaving, staying = (asyncio.create_task(compiler.check(grammar)) for _ in range(2))
        await asyncio.sleep(0.01)
        leaving.cancel()
        return await staying

    assert run(work) == Grammar(GrammarKind.REGEX, "a")


# ---- what clients write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json", "value": {"type": "integer"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer"}')),
        ({"type": "json_object", "value": '{"a": 1}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"a":1}')),
        ({"type": "json"}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT)),
        (
            {"type": "json_schema", "value": {"name": "n", "schema": {"b": 1, "a": 2}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"b":1,"a":2}'),
        ),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ({"type": "regex", "value": "a+", "ignored": 1}, Grammar(GrammarKind.REGEX, "a+")),
        ({"type": "choice", "value": ["a", "ü"]}, Grammar(GrammarKind.CHOICE, '["a","ü"]')),
        ({"type": "lark", "value": "start: /a/"}, Grammar(GrammarKind.LARK, "start: /a/")),
    ],
    ids=str,
)
def test_every_shape_in_use_is_understood(shape: Any, grammar: Grammar | None) -> None:
    assert read_grammar(shape, "grammar") == grammar


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ("json", "grammar"),
        ({}, "grammar.type"),
        ({"type": "xml"}, "grammar.type"),
        ({"type": "regex"}, "grammar.value"),
        ({"type": "json", "value": "{"}, "grammar.value"),
        ({"type": "json", "value": 5}, "grammar.value"),
        ({"type": "json", "value": "[" * 100_000}, "grammar.value"),
        ({"type": "choice", "value": [1]}, "grammar.value"),
        ({"type": "json_schema"}, "grammar.json_schema"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_a_shape_that_makes_no_sense_is_refused_by_name(shape: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_grammar(shape, "grammar")
    assert refused.value.param == place
    assert f"`{place}`" in str(refused.value)


@pytest.mark.parametrize("kind", GrammarKind)
def test_every_kind_arrives_at_a_shard_as_it_was_sent(kind: GrammarKind) -> None:
    grammar = Grammar(kind, "text")
    message = pb.NextTokenChooserParameters(grammar=grammar.value, grammar_type=grammar_type(grammar))
    assert from_pb(pb.NextTokenChooserParameters.FromString(message.SerializeToString())) == grammar


def test_no_grammar_arrives_as_none() -> None:
    assert from_pb(pb.NextTokenChooserParameters(grammar_type=grammar_type(None))) is None
