"""A grammar on its way: from the body of a request to the backend, and from a client of the shard to its tokens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.wire import from_pb
from legato.pb import generate_pb2 as pb
from legato.router.shards import GrpcShards
from legato.server.loading import LoadedModel
from tests.generation import parameters_of
from tests.grammar.texts import schema
from tests.http.asgi import FakeBackend, ask
from tests.server.shard import Log, finish, load_model, prefill, refusal, request, serving, warmup
from tests.tiny_models import tiny_llama

DIGITS = {"type": "regex", "value": "[0-9]+"}
UNIQUE = {"type": "json", "value": {"type": "array", "uniqueItems": True}}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "a", "parameters": {"grammar": DIGITS}}),
        ("/generate_stream", {"inputs": "a", "parameters": {"grammar": DIGITS}}),
        ("/v1/completions", {"prompt": "a", "response_format": DIGITS}),
    ],
)
def test_every_route_brings_its_grammar_to_the_shards_and_then_the_request(path: str, body: Any) -> None:
    backend = FakeBackend()
    assert ask(path, body, backend).status == 200
    grammar = Grammar(GrammarKind.REGEX, "[0-9]+")
    assert backend.prepared == [grammar]
    assert [from_pb(parameters_of(request)) for request in backend.requests] == [grammar]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"inputs": "a", "parameters": {"grammar": UNIQUE}}, 422),
        ("/v1/completions", {"prompt": "a", "response_format": UNIQUE, "stream": True}, 400),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_is_scheduled(
    path: str, body: Any, status: int
) -> None:
    backend = FakeBackend()
    answer = ask(path, body, backend)
    assert answer.status == status
    assert b"`uniqueItems`" in answer.body
    assert backend.requests == backend.prepared == []


def test_with_schema_lenient_it_is_served() -> None:
    assert ask("/generate", {"inputs": "a", "parameters": {"grammar": UNIQUE}}, schema_lenient=True).status == 200


def test_a_shard_compiles_ahead_and_says_what_it_cannot(loaded: LoadedModel, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(loaded, tmp_path / "shard-0"):
            shards = await GrpcShards.connect(str(tmp_path / "shard-0"))
            await shards.prepare(schema({"type": "integer"}))
            with pytest.raises(GrammarError, match="unclosed group"):
                await shards.prepare(Grammar(GrammarKind.REGEX, "("))
            await shards.close()

    asyncio.run(run())


def constrained(grammar: str, kind: pb.GrammarType) -> pb.Request:
    parameters = pb.NextTokenChooserParameters(grammar=grammar, grammar_type=kind)
    return request(1, [100, 7, 256], 30, parameters=parameters, ignore_eos=False)


def test_a_client_of_tgis_calls_gets_a_text_of_its_grammar(loaded: LoadedModel, tmp_path: Path) -> None:
    async def run() -> str:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup())
            log = Log()
            await finish(shard, log, log.add(await shard.Prefill(prefill(1, constrained("(ab|cd){3}", 2)))))  # type: ignore[arg-type]
            return log.texts[1].text

    assert re.fullmatch("(ab|cd){3}", asyncio.run(run()))


def test_a_client_of_tgis_calls_hears_what_is_wrong_with_its_grammar(loaded: LoadedModel, tmp_path: Path) -> None:
    async def run() -> str:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup())
            _, problem = await refusal(shard.Prefill(prefill(1, constrained("(", 2))))  # type: ignore[arg-type]
            log = Log()
            await finish(shard, log, log.add(await shard.Prefill(prefill(2, constrained("a", 2)))))  # type: ignore[arg-type]
            assert log.texts[1].text == "a", "the shard goes on"
            return problem

    assert "unclosed group" in asyncio.run(run())
