"""The native API over real HTTP, from launcher to shard and back."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client import JSON, Client, at_once, text_of
from tests.integration.conftest import MAX_CONCURRENT_REQUESTS
from tests.integration.processes import Launched, until
from tests.tiny_models import greedy_oracle

NUM_TOKENS = 24


def test_one_answer_has_the_tokens_of_transformers(client: Client, model: Path) -> None:
    answer = client.generate("hello world", max_new_tokens=NUM_TOKENS, details=True, ignore_eos=True)
    prompt = [token["id"] for token in client.post("/tokenize", {"inputs": "hello world"}).json()]
    (expected,) = greedy_oracle(model, [prompt], NUM_TOKENS)
    assert [token["id"] for token in answer["details"]["tokens"]] == expected
    assert answer["details"]["finish_reason"] == "length"
    assert answer["details"]["generated_tokens"] == NUM_TOKENS


def test_a_stream_is_framed_as_events_and_says_what_one_answer_says(client: Client) -> None:
    stream = client.stream("hello", max_new_tokens=NUM_TOKENS, ignore_eos=True, details=True)
    assert stream.status == 200
    assert stream.headers["content-type"].startswith("text/event-stream")
    frames = list(stream.frames())
    assert all(frame.startswith(b"data:") and frame.count(b"\n") == 1 for frame in frames)
    events = list(client.stream("hello", max_new_tokens=NUM_TOKENS, ignore_eos=True, details=True))
    assert len(frames) == len(events) == NUM_TOKENS
    assert [event["index"] for event in events] == list(range(1, NUM_TOKENS + 1))
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    whole = client.generate("hello", max_new_tokens=NUM_TOKENS, ignore_eos=True)["generated_text"]
    assert text_of(events) == events[-1]["generated_text"] == whole
    assert events[-1]["details"]["finish_reason"] == "length"


def test_the_compatible_route_answers_a_list_or_a_stream_with_the_prompt_in_front(client: Client) -> None:
    body: JSON = {"inputs": "hi", "parameters": {"max_new_tokens": 5, "ignore_eos": True}}
    (answer,) = client.post("/", body).json()
    plain = client.generate("hi", max_new_tokens=5, ignore_eos=True)["generated_text"]
    assert answer["generated_text"] == "hi" + plain
    streamed = client.post("/", {**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.body.count(b"data:") == 5


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_a_server_that_runs_is_healthy(client: Client, path: str) -> None:
    assert client.get(path).status == 200


def test_info_names_the_model_and_the_limits(client: Client, model: Path) -> None:
    info = client.get("/info").json()
    assert info["model_id"] == str(model)
    assert info["max_concurrent_requests"] == MAX_CONCURRENT_REQUESTS
    assert info["max_input_tokens"] + 1 == info["max_total_tokens"] == 4096
    assert info["router"] == "text-generation-router"


def test_metrics_count_requests_tokens_and_steps(client: Client) -> None:
    names = ["tgi_request_count", "tgi_request_success", "tgi_request_generated_tokens_sum"]
    names += ['tgi_batch_inference_count{method="prefill"}', 'tgi_batch_inference_count{method="decode"}']
    before = [client.metric(name) for name in names]
    client.generate("count me", max_new_tokens=7, ignore_eos=True)
    # The step after the last token may still be on its way.
    requests, successes, tokens, prompts, decodes = (client.metric(name) for name in names)
    assert (requests, successes, tokens) == (before[0] + 1, before[1] + 1, before[2] + 7)
    assert prompts > before[3]
    assert decodes >= before[4] + 6


def test_the_documentation_is_served(client: Client) -> None:
    assert client.get("/docs").headers["content-type"].startswith("text/html")
    paths = client.get("/api-doc/openapi.json").json()["paths"]
    assert {"/generate", "/generate_stream", "/tokenize", "/info", "/health"} <= set(paths)


def test_tokenize_says_which_bytes_each_token_covers(client: Client) -> None:
    tokens = client.post("/tokenize", {"inputs": "añb"}).json()
    assert [token["text"] for token in (tokens[0], tokens[-1])] == ["a", "b"]
    assert (tokens[0]["start"], tokens[-1]["start"], tokens[-1]["stop"]) == (0, 3, 4)


def test_logprobs_top_tokens_and_the_prompt_come_on_request(client: Client) -> None:
    answer = client.generate("hello", max_new_tokens=4, details=True, top_n_tokens=3, decoder_input_details=True)
    details = answer["details"]
    assert [token["text"] for token in details["prefill"]] == list("hello")
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3
        assert top[0]["id"] == token["id"]
        assert top[0]["logprob"] == pytest.approx(token["logprob"], abs=1e-5)
        assert [other["logprob"] for other in top] == sorted((other["logprob"] for other in top), reverse=True)


def test_a_stop_string_ends_text_and_stream_right_after_it(client: Client) -> None:
    whole = client.generate("stop here", max_new_tokens=60, ignore_eos=True)["generated_text"]
    stop = whole[20:23]
    expected = whole[: whole.index(stop) + len(stop)]
    answer = client.generate("stop here", max_new_tokens=60, ignore_eos=True, stop=[stop], details=True)
    assert answer["generated_text"] == expected
    assert answer["details"]["finish_reason"] == "stop_sequence"
    events = list(client.stream("stop here", max_new_tokens=60, ignore_eos=True, stop=[stop]))
    assert text_of(events) == events[-1]["generated_text"] == expected


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_16_streams_at_once_say_what_each_says_alone(client: Client, kind: str) -> None:
    rng = random.Random(3)
    requests: list[dict[str, Any]] = []
    for number in range(16):
        prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 90)))
        seeded = {"do_sample": True, "seed": number, "temperature": 0.9, "top_p": 0.9}
        requests.append({"inputs": prompt, "max_new_tokens": rng.randrange(5, 40), "ignore_eos": True})
        requests[-1] |= seeded if kind == "seeded" else {}

    def token_ids(request: dict[str, Any]) -> list[int]:
        return [event["token"]["id"] for event in client.stream(**request)]

    alone = [token_ids(request) for request in requests]
    assert [len(ids) for ids in alone] == [request["max_new_tokens"] for request in requests]
    assert at_once([partial(token_ids, request) for request in requests]) == alone


def test_best_of_two_comes_with_the_other(client: Client) -> None:
    answer = client.generate("two", max_new_tokens=5, do_sample=True, best_of=2, details=True, ignore_eos=True)
    (other,) = answer["details"]["best_of_sequences"]
    assert other["generated_text"] != answer["generated_text"]


def test_one_request_more_than_there_are_places_is_answered_429(server: Launched) -> None:
    client = server.client
    streams = [client.stream("x", max_new_tokens=1000, ignore_eos=True) for _ in range(MAX_CONCURRENT_REQUESTS)]
    for path in ("/generate", "/generate_stream"):
        refused = client.post(path, {"inputs": "one more"})
        assert refused.status == 429
        assert refused.json()["error_type"] == "overloaded"
    for stream in streams:
        stream.hang_up()
    until(lambda: client.post("/generate", {"inputs": "now"}).status == 200, "places are free again")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        ({"inputs": ""}, 422, "inputs"),
        ({"inputs": "a", "parameters": {"temperature": -1}}, 422, "temperature"),
        ({"inputs": "a" * 5000, "parameters": {"max_new_tokens": 1}}, 422, "max_new_tokens"),
    ],
)  # fmt: skip
def test_a_bad_request_is_its_senders_problem_only(client: Client, body: Any, status: int, words: str) -> None:
    answer = client.post("/generate", body)
    assert answer.status == status
    assert words in answer.json()["error"]
    assert client.get("/health").status == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(client: Client) -> None:
    with client.send("/generate", "a" * 2_000_000, cut=2_000_000) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
