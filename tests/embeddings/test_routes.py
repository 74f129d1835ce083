"""The routes of a server that embeds or classifies: what they take, answer and refuse."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from legato.ipc.settings import RouterSettings
from legato.scheduling.state import GenerationRequest, Output
from tests.embeddings.served import EMBED_SETTINGS, EMBEDDING, app_of, embedder, tokenizer, vector_of, with_labels
from tests.generation import admission_of
from tests.http.asgi import SETTINGS, FakeBackend, get, post


def ask(app: ASGIApp, path: str, body: Any) -> Any:
    return asyncio.run(post(app, path, body))


def served(path: str, body: Any, settings: RouterSettings = EMBED_SETTINGS) -> tuple[Any, list[GenerationRequest]]:
    """The answer and what the scheduler got."""
    embedding = settings.embedding
    assert embedding is not None

    async def run() -> Any:
        return await post(app_of(backend, settings), path, body)

    backend = embedder(embedding.size)
    return asyncio.run(run()), backend.requests


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text).ids
    return found


def normalized(vector: list[float]) -> list[float]:
    length = math.hypot(*vector)
    return [number / length for number in vector]


def test_a_browser_is_led_to_the_reference() -> None:
    answer = asyncio.run(get(app_of(embedder()), "/", {"accept": "text/html"}))
    assert (answer.status, answer.headers["location"]) == (303, "docs")


# ---- OpenAI's --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", [ids("hello")]),
        (["hello", "the fox"], [ids("hello"), ids("the fox")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_input_is_a_text_token_ids_or_a_list_of_those(given: Any, expected: list[list[int]]) -> None:
    answer, requests = served("/v1/embeddings", {"input": given, "model": "any"})
    assert answer.status == 200 and [request.input_ids for request in requests] == expected
    body = answer.json()
    assert [item["index"] for item in body["data"]] == list(range(len(expected)))
    vectors = [normalized(vector_of(request, 4)) for request in requests]
    for item, vector in zip(body["data"], vectors, strict=True):
        assert item["object"] == "embedding" and item["embedding"] == pytest.approx(vector, abs=1e-6)
    tokens = sum(map(len, expected))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "tiny")


def test_base64_has_the_floats_of_the_list() -> None:
    plain, _ = served("/v1/embeddings", {"input": "hello"})
    packed, _ = served("/v1/embeddings", {"input": "hello", "encoding_format": "base64"})
    floats = struct.unpack("<4f", base64.b64decode(packed.json()["data"][0]["embedding"]))
    assert list(floats) == pytest.approx(plain.json()["data"][0]["embedding"], abs=0)


def test_dimensions_cut_before_the_length_becomes_one() -> None:
    answer, requests = served("/v1/embeddings", {"input": "hello", "dimensions": 2})
    assert answer.json()["data"][0]["embedding"] == pytest.approx(normalized(vector_of(requests[0], 2)), abs=1e-6)


def test_embeddings_keep_their_length_if_the_checkpoint_does_not_normalize() -> None:
    settings = replace(SETTINGS, embedding=replace(EMBEDDING, normalized=False))
    answer, requests = served("/v1/embeddings", {"input": "hello"}, settings)
    assert answer.json()["data"][0]["embedding"] == vector_of(requests[0], 4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 7}, None),
    ],
)
def test_what_is_wrong_is_an_error_of_openai_that_names_the_field(body: dict[str, Any], param: str | None) -> None:
    answer, requests = served("/v1/embeddings", body)
    assert answer.status == 400 and not requests
    assert answer.json()["error"]["type"] == "invalid_request_error" and answer.json()["error"]["param"] == param


def test_a_text_that_is_too_long_says_so_in_openais_code() -> None:
    answer, requests = served("/v1/embeddings", {"input": ["hi", "z" * 30]})
    assert answer.status == 400 and not requests
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# ---- TEI's -----------------------------------------------------------------------------------------------------------


def test_embed_answers_a_list_and_the_figures_of_tei() -> None:
    answer, requests = served("/embed", {"inputs": "hello"})
    assert answer.json() == [pytest.approx(normalized(vector_of(requests[0], 4)), abs=1e-6)]
    tokens = str(len(requests[0].input_ids))
    assert (answer.headers["x-compute-tokens"], answer.headers["x-compute-characters"]) == (tokens, "5")
    assert answer.headers["x-queue-time"] == "250" and "x-tokenization-time" in answer.headers
    assert served("/", {"inputs": "hello"})[0].json() == answer.json()


def test_embed_normalizes_unless_it_is_told_not_to() -> None:
    answer, requests = served("/embed", {"inputs": ["hello", "fox"], "normalize": False})
    assert answer.json() == [vector_of(request, 4) for request in requests]


@pytest.mark.parametrize(("side", "kept"), [(None, "a"), ("left", "z")])
def test_truncate_cuts_a_text_and_keeps_its_special_tokens(side: str | None, kept: str) -> None:
    text = "a" * 30 + "z" * 30
    answer, requests = served("/embed", {"inputs": text, "truncate": True, "truncation_direction": side})
    assert answer.status == 200
    cut = requests[0].input_ids
    assert len(cut) == 24 and (cut[0], cut[-1]) == (0, 1)
    assert tokenizer().decode(cut) == kept * 22
    assert served("/embed", {"inputs": text})[0].status == 422


def test_token_ids_are_cut_too() -> None:
    _, requests = served("/embed", {"inputs": [list(range(5, 40))], "truncate": True})
    assert requests[0].input_ids == list(range(5, 29))


def test_a_prompt_stands_before_the_text() -> None:
    _, requests = served("/embed", {"inputs": "hello", "prompt_name": "query"})
    assert requests[0].input_ids == ids("ask: hello")
    answer, _ = served("/embed", {"inputs": "hello", "prompt_name": "other"})
    assert answer.status == 422 and "query, text" in answer.json()["error"]


def test_the_default_prompt_is_that_of_the_checkpoint() -> None:
    settings = replace(SETTINGS, embedding=replace(EMBEDDING, default_prompt="query"))
    for path, name in (("/embed", "inputs"), ("/v1/embeddings", "input")):
        _, requests = served(path, {name: "hello"}, settings)
        assert requests[0].input_ids == ids("ask: hello")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ""}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 7}, 422, "Validation"),
        ("/embed", {"input": "a"}, 422, "Validation"),
        ("/embed", b"{", 400, "Validation"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend"),
        ("/predict", {"inputs": "a"}, 424, "Backend"),
    ],
)
def test_errors_are_in_teis_words(path: str, body: Any, status: int, kind: str) -> None:
    answer, _ = served(path, body)
    assert (answer.status, answer.json()["error_type"]) == (status, kind)


# ---- classifiers -----------------------------------------------------------------------------------------------------


def test_predict_has_the_likeliest_label_first() -> None:
    answer, requests = served("/predict", {"inputs": "hello"}, with_labels("bad", "good", "so so"))
    numbers = vector_of(requests[0], 3)
    powers = [math.exp(number - max(numbers)) for number in numbers]
    shares = sorted((power / sum(powers) for power in powers), reverse=True)
    assert [each["score"] for each in answer.json()] == pytest.approx(shares, abs=1e-6)
    raw, _ = served("/predict", {"inputs": "hello", "raw_scores": True}, with_labels("bad", "good", "so so"))
    assert {each["label"]: each["score"] for each in raw.json()} == dict(
        zip(("bad", "good", "so so"), numbers, strict=True)
    )


@pytest.mark.parametrize(
    ("inputs", "starts", "is_batch"),
    [
        ("hello", [0], False),
        (["hello"], [0], False),
        (["hello", "fox"], [7], False),
        ([["hello"], ["hello", "fox"]], [0, 7], True),
    ],
)
def test_predict_takes_texts_pairs_and_batches_of_both(inputs: Any, starts: list[int], is_batch: bool) -> None:
    answer, requests = served("/predict", {"inputs": inputs}, with_labels("no", "yes"))
    assert answer.status == 200 and isinstance(answer.json()[0], list) is is_batch
    second = len(ids("hello"))
    expected = [second if start else 0 for start in starts]
    assert [admission_of(request).second_start for request in requests] == expected


@pytest.mark.parametrize("inputs", [["a", "b", "c"], [["a"], "b"], [["a", "b", "c"]], [[]], []])
def test_predict_refuses_other_shapes(inputs: Any) -> None:
    answer, _ = served("/predict", {"inputs": inputs}, with_labels("no", "yes"))
    assert answer.status in (400, 422) and "`inputs`" in answer.json()["error"]


def test_rerank_orders_texts_by_score() -> None:
    texts = ["the quick brown fox", "hello", "dog"]
    answer, requests = served("/rerank", {"query": "hi", "texts": texts, "return_text": True}, with_labels("score"))
    raws = [vector_of(request, 1)[0] for request in requests]
    scores = {text: 1 / (1 + math.exp(-raw)) for text, raw in zip(texts, raws, strict=True)}
    assert [rank["text"] for rank in answer.json()] == sorted(texts, key=lambda text: -scores[text])
    for rank in answer.json():
        assert texts[rank["index"]] == rank["text"] and rank["score"] == pytest.approx(scores[rank["text"]], abs=1e-6)
    raw, _ = served("/", {"query": "hi", "texts": texts, "raw_scores": True}, with_labels("score"))
    assert {rank["score"] for rank in raw.json()} == set(raws)
    assert "text" not in raw.json()[0]


def test_a_classifier_says_which_routes_serve_it() -> None:
    labels = with_labels("no", "yes")
    assert "/predict" in served("/embed", {"inputs": "a"}, labels)[0].json()["error"]
    assert "/predict" in served("/v1/embeddings", {"input": "a"}, labels)[0].json()["error"]["message"]
    answer, _ = served("/rerank", {"query": "a", "texts": ["b"]}, labels)
    assert answer.status == 424 and "/predict" in answer.json()["error"]


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/invocations"])
def test_routes_of_generation_name_the_task_that_they_need(path: str) -> None:
    answer, _ = served(path, {"inputs": "a"})
    assert answer.status == 404 and "--task generate" in answer.body.decode()


@pytest.mark.parametrize("path", ["/embed", "/rerank", "/predict", "/v1/embeddings"])
def test_a_server_that_generates_names_the_task_that_embeds(path: str) -> None:
    async def run() -> Any:
        from legato.http.app import create_app

        return await post(create_app(FakeBackend(), tokenizer(), SETTINGS), path, {"inputs": "a"})  # type: ignore[arg-type]

    answer = asyncio.run(run())
    assert answer.status == 404 and "--task embed" in answer.body.decode()


def test_info_and_models_say_what_is_served() -> None:
    async def run(settings: RouterSettings) -> tuple[Any, Any]:
        app = app_of(embedder(), settings)
        return (await get(app, "/info")).json(), (await get(app, "/v1/models")).json()

    info, models = asyncio.run(run(EMBED_SETTINGS))
    assert info["task"] == "embed" and info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["dimensions"], info["max_input_length"], info["max_client_batch_size"]) == (4, 24, 6)
    assert models["data"][0]["task"] == "embed"
    info, _ = asyncio.run(run(with_labels("score")))
    assert info["model_type"] == {"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}}


def test_one_failure_ends_the_request_and_cancels_its_other_texts() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return [Output(error="broken")] if request.id == 1 else []

    backend = FakeBackend(script, limits=embedder().limits)

    async def run() -> Any:
        return await post(app_of(backend), "/embed", {"inputs": ["a", "b", "c"]})

    answer = asyncio.run(run())
    assert answer.status == 424 and "broken" in answer.json()["error"]
    assert backend.cancelled == [2, 3]
