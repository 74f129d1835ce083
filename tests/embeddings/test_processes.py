"""`--task embed` from the launcher to the shard and back: real processes, vectors of transformers, a killed shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tests.embeddings.tiny_encoders import tiny_encoder, token_vectors, write_modules
from tests.integration.client import at_once
from tests.integration.processes import Launched, launched, run, until

MAX_TOKENS = 100
TEXTS = ["hello", "The quick brown fox jumps over the lazy dog", "x", "hello", "ünïcödé " * 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_encoder(tmp_path_factory.mktemp("bert"), "Bert")
    write_modules(folder, "mean", max_tokens=MAX_TOKENS)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("server"), folder, "--task=embed", "--http-workers=1") as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vectors = [token_vectors(folder, tokenizer.encode(text).ids).mean(0) for text in TEXTS]
    found: list[list[float]] = F.normalize(torch.stack(vectors), dim=1).tolist()
    return found


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


def test_embeddings_are_those_of_transformers(server: Launched, expected: list[list[float]]) -> None:
    assert_close(server.client.post("/embed", {"inputs": TEXTS}).json(), expected)
    data = server.client.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    assert_close([item["embedding"] for item in data], expected)


def test_requests_of_many_clients_are_embedded_as_if_they_were_alone(
    server: Launched, expected: list[list[float]]
) -> None:
    def ask(number: int) -> Any:
        return server.client.post("/embed", {"inputs": TEXTS[number % len(TEXTS)]}).json()

    for number, answer in enumerate(at_once([partial(ask, number) for number in range(40)])):
        assert_close(answer, [expected[number % len(TEXTS)]])


def test_texts_are_cut_where_the_checkpoint_says(server: Launched) -> None:
    assert server.client.get("/info").json()["max_input_length"] == MAX_TOKENS
    too_long = {"inputs": "a" * MAX_TOKENS}
    assert server.client.post("/embed", too_long).status == 422
    assert server.client.post("/embed", {**too_long, "truncate": True}).headers["x-compute-tokens"] == str(MAX_TOKENS)


def test_a_killed_shard_is_replaced_and_requests_do_not_notice(server: Launched, expected: list[list[float]]) -> None:
    pid = server.shard().pid
    server.shard().kill()
    assert_close(server.client.post("/embed", {"inputs": TEXTS}).json(), expected)
    until(lambda: server.client.get("/health").status == 200, "the server is healthy")
    assert server.shard().pid != pid


def test_metrics_count_texts_and_tokens(server: Launched) -> None:
    metrics = server.client.get("/metrics").body.decode()
    assert "tgi_request_success" in metrics and "legato_prompt_tokens" in metrics


def test_an_encoder_without_the_task_names_it(folder: Path) -> None:
    outcome = run("text-generation-server", "serve", str(folder), f"--uds-path={folder}/shard")
    assert outcome.code != 0 and "--task embed" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task=embed", "--num-shard=2"), "--num-shard 1"),
        (("--pooling=cls",), "--task embed"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    outcome = run("text-generation-launcher", f"--model-id={folder}", *arguments)
    assert outcome.code != 0 and words in outcome.stderr
