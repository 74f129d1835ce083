"""Adapters in real processes: chosen by requests, loaded and unloaded while streams run, there again after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as pb_grpc
from tests.integration.client import JSON, Client, at_once
from tests.integration.processes import Launched, Program, launched, until
from tests.lora.tiny_adapters import base_model, greedy_tokens, merged_model, write_adapter
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.lora

PROMPT = "Once upon a time"
LONG = {"max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_llama(folder / "base", max_position_embeddings=1024)
    for seed, (name, rank) in enumerate({"french": 8, "german": 24, "latin": 16}.items()):
        write_adapter(base, folder / name, seed=seed, rank=rank)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one-shard", "two-shards"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Launched]:
    with launched(
        tmp_path_factory.mktemp("server"), root / "base", f"--num-shard={request.param}", "--max-restarts=20",
        "--dtype=float32",
        f"--lora-adapters=french={root / 'french'}", "--lora-allow-runtime", f"--lora-allow={root},acme/*",
    ) as running:  # fmt: skip
        yield running


def text_of(client: Client, adapter: str | None, num_tokens: int = 12) -> str:
    answer = client.generate(PROMPT, max_new_tokens=num_tokens, ignore_eos=True, adapter_id=adapter)
    return str(answer["generated_text"])


def load(client: Client, name: str, path: Path | str) -> tuple[int, JSON]:
    answer = client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    return answer.status, answer.json()


def unload(client: Client, name: str) -> int:
    return client.post("/v1/unload_lora_adapter", {"lora_name": name}).status


def names(client: Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]][1:]


def test_every_api_chooses_the_adapter(server: Launched, root: Path) -> None:
    client = server.client
    base, french = text_of(client, None), text_of(client, "french")
    assert base != french
    from legato.modelfiles.files import ModelFiles

    tokenizer = ModelFiles.open(root / "base").tokenizer()
    ids = greedy_tokens(merged_model(base_model(root / "base"), root / "french"), tokenizer.encode(PROMPT).ids, 12)
    assert french == tokenizer.decode(ids, skip_special_tokens=False) or french == tokenizer.decode(ids)
    completion = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answers = {
        model: client.post("/v1/completions", {**completion, "model": model}).json()["choices"][0]["text"]
        for model in ("french", "tgi")
    }
    assert answers == {"french": french, "tgi": base}
    assert client.get("/v1/models/french").json()["parent"] == str(root / "base")


def test_unknown_adapters_are_404_everywhere(server: Launched) -> None:
    client = server.client
    assert client.post("/generate", {"inputs": "a", "parameters": {"adapter_id": "x"}}).status == 404
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = client.post(path, {**body, "model": "x"})
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_adapter_is_loaded_and_unloaded_while_others_stream(server: Launched, root: Path) -> None:
    client = server.client
    expected = {name: text_of(client, name, 300) for name in (None, "french")}
    streams = {name: client.stream(PROMPT, **LONG, adapter_id=name) for name in expected}
    begun = {name: [next(events) for _ in range(3)] for name, events in ((n, iter(s)) for n, s in streams.items())}
    assert load(client, "german", root / "german")[0] == 200
    assert names(client) == ["french", "german"]
    german = text_of(client, "german")
    assert german not in expected.values()
    assert unload(client, "german") == 200 and names(client) == ["french"]
    assert client.post("/generate", {"inputs": "a", "parameters": {"adapter_id": "german"}}).status == 404
    # The same name with other weights: nothing of the first is left in the prefix cache.
    assert load(client, "german", root / "latin")[0] == 200
    latin = text_of(client, "german")
    assert latin != german
    assert unload(client, "german") == 200
    rest = at_once([partial(list, stream) for stream in streams.values()])
    for name, more in zip(expected, rest, strict=True):
        assert [*begun[name], *more][-1]["generated_text"] == expected[name]


def test_what_cannot_be_loaded_says_why_and_harms_nobody(server: Launched, root: Path, tmp_path: Path) -> None:
    client = server.client
    (root / "broken").mkdir(exist_ok=True)
    (root / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    cases = {
        ("x", str(tmp_path)): (403, "--lora-allow"),
        ("x", "other/repository"): (403, "--lora-allow"),
        ("french", str(root / "german")): (409, "already loaded"),
        ("tgi", str(root / "german")): (422, "cannot be the name"),
        ("x", str(root / "nothing")): (422, "no such folder"),
        ("x", str(root / "base")): (422, "adapter_config.json is missing"),
        ("x", str(root / "broken")): (422, "'use_dora'"),
    }
    for (name, path), (status, words) in cases.items():
        found, body = load(client, name, path)
        assert (found, words in body["error"]["message"]) == (status, True), body
    assert unload(client, "nobody") == 404
    assert names(client) == ["french"]


def test_new_shards_have_the_adapters_before_requests_go_on(server: Launched, root: Path) -> None:
    client = server.client
    assert load(client, "german", root / "german")[0] == 200
    expected = {name: text_of(client, name, 300) for name in ("french", "german")}
    streams = {name: client.stream(PROMPT, **LONG, adapter_id=name) for name in expected}
    begun = {name: [next(events) for _ in range(3)] for name, events in ((n, iter(s)) for n, s in streams.items())}
    pid = server.shard().pid
    server.shard().kill()
    rest = at_once([partial(list, stream) for stream in streams.values()])
    for name, more in zip(expected, rest, strict=True):
        assert [*begun[name], *more][-1]["generated_text"] == expected[name]
    until(lambda: client.get("/health").status == 200, "the server is healthy")
    assert server.shard().pid != pid and names(client) == ["french", "german"]
    assert unload(client, "german") == 200


def test_tgis_calls_choose_adapters_too(root: Path, tmp_path: Path) -> None:
    """Prefill of a shard that no router drives."""
    path = tmp_path / "shard"
    adapters = f"--lora-adapters=french={root / 'french'}"
    shard = Program(tmp_path, "text-generation-server", "serve", str(root / "base"), f"--uds-path={path}", adapters)
    try:
        until(lambda: Path(f"{path}-0").exists(), "the shard listens")
        with grpc.insecure_channel(f"unix://{path}-0") as channel:
            stub = pb_grpc.TextGenerationServiceStub(channel)
            stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64, max_rows=4, max_total_tokens=128))

            def first_token(number: int, adapter: str | None) -> float:
                request = pb.Request(
                    id=number, input_ids=[5, 6, 7, 8], adapter_id=adapter,
                    stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
                )  # fmt: skip
                answer = stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=number, requests=[request])))
                return float(answer.generations[0].tokens.logprobs[0])

            assert first_token(1, None) == first_token(2, None) != first_token(3, "french")
            with pytest.raises(grpc.RpcError) as caught:
                first_token(4, "german")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
            assert "no adapter 'german' is loaded" in caught.value.details()  # type: ignore[attr-defined]
    finally:
        shard.end()
