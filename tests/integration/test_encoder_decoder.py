"""An encoder-decoder model from launcher to shard and back: outside, its prompt is what the encoder reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client import Client
from tests.integration.processes import launched
from tests.models.tiny_t5 import generated, tiny_flan_t5

NUM_TOKENS = 12
TEXT = "hello world"  # a byte is a token
LIMIT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flan_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Client]:
    limits = (f"--max-input-tokens={LIMIT}", "--max-total-tokens=64", "--max-concurrent-requests=8")
    with launched(tmp_path_factory.mktemp("t5-server"), folder, *limits) as server:
        yield server.client


def test_an_answer_has_the_tokens_that_transformers_generates(t5: Client, folder: Path) -> None:
    asked = {"inputs": TEXT, "parameters": {"max_new_tokens": NUM_TOKENS, "decoder_input_details": True}}
    answer = t5.post("/generate", {**asked, "parameters": {**asked["parameters"], "ignore_eos": True}}).json()
    prompt = [token["id"] for token in t5.post("/tokenize", {"inputs": TEXT}).json()]
    (expected,) = generated(folder, [prompt], NUM_TOKENS)
    details = answer["details"]
    assert [token["id"] for token in details["tokens"]] == expected
    assert [token["id"] for token in details["prefill"]] == prompt
    assert {token["logprob"] for token in details["prefill"]} == {None}


def test_a_stream_and_a_completion_say_the_same_and_count_the_encoders_tokens(t5: Client) -> None:
    (*_, last) = t5.stream(TEXT, max_new_tokens=NUM_TOKENS, ignore_eos=True, details=True)
    body = {"model": "tgi", "prompt": TEXT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    completion = t5.post("/v1/completions", body).json()
    assert completion["choices"][0]["text"] == last["generated_text"]
    assert completion["usage"]["prompt_tokens"] == last["details"]["input_length"] == len(TEXT)
    assert completion["usage"]["completion_tokens"] == NUM_TOKENS


def test_an_echoed_prompt_has_no_logprobs(t5: Client) -> None:
    body = {"model": "tgi", "prompt": TEXT, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    logprobs = t5.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][: len(TEXT)] == [None] * len(TEXT)
    assert None not in logprobs["token_logprobs"][len(TEXT) :]


def test_the_prompt_may_be_as_long_as_the_limit_says_and_no_longer(t5: Client) -> None:
    assert (
        t5.generate("x" * LIMIT, max_new_tokens=24, details=True, ignore_eos=True)["details"]["generated_tokens"] == 24
    )
    refused = t5.post("/generate", {"inputs": "x" * (LIMIT + 1), "parameters": {"max_new_tokens": 1}})
    assert refused.status == 422
    assert f"`inputs` must have less than {LIMIT} tokens. Given: {LIMIT + 1}" in refused.json()["error"]


def test_the_compatible_route_answers_without_the_prompt(t5: Client) -> None:
    asked = {"inputs": TEXT, "parameters": {"max_new_tokens": 4, "ignore_eos": True}}
    (answer,) = t5.post("/", asked).json()
    assert answer["generated_text"] == t5.generate(TEXT, max_new_tokens=4, ignore_eos=True)["generated_text"]
