from __future__ import annotations

from typing import Any

import pytest

from legato.pb import generate_pb2 as pb
from legato.scheduling.state import GenerationRequest
from tests.generation import parameters_of, sampling
from tests.http.asgi import EOS, FakeBackend
from tests.http.routes.openai.fakes import chat, complete, problem


def asked(**request: Any) -> GenerationRequest:
    """What the scheduler is asked for; both routes ask alike."""
    backend = FakeBackend()
    for ask in (complete, chat):
        answer = ask(backend, seed=0, **request)
        assert answer.status == 200, answer.body
    first, second = backend.requests
    assert first.payload == second.payload
    return first


def asked_sampling(**request: Any) -> pb.NextTokenChooserParameters:
    return parameters_of(asked(**request))


def test_the_default_samples_at_temperature_1() -> None:
    assert asked_sampling() == sampling(do_sample=True)


@pytest.mark.parametrize("request_", [{"temperature": 0}, {"temperature": 1e-60}, {"top_p": 0}])
def test_the_likeliest_token_is_taken_if_nothing_else_is_left(request_: dict[str, Any]) -> None:
    assert asked_sampling(**request_) == sampling(do_sample=False)


def test_every_sampling_field_arrives() -> None:
    request: dict[str, Any] = {
        "temperature": 2.5,
        "top_k": 7,
        "top_p": 0.5,
        "typical_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "frequency_penalty": -2,
        "presence_penalty": 2,
    }
    assert asked_sampling(**request, logit_bias={"5": -100, "6": 1.5}) == sampling(
        do_sample=True, logit_bias={5: -100.0, 6: 1.5}, **request
    )


@pytest.mark.parametrize("request_", [{"top_p": 1}, {"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0}])
def test_a_filter_may_be_off_in_so_many_words(request_: dict[str, Any]) -> None:
    assert asked_sampling(**request_) == sampling(do_sample=True)


def test_no_end_before_min_tokens() -> None:
    wanted = asked_sampling(min_tokens=5, stop_token_ids=[9])
    assert (wanted.min_new_tokens, list(wanted.end_token_ids)) == (5, [EOS, 9])
    assert list(asked_sampling(min_tokens=5, ignore_eos=True).end_token_ids) == []


def test_stop_tokens_and_ignored_ends_reach_the_scheduler() -> None:
    request = asked(stop_token_ids=[9, 8], ignore_eos=True)
    assert request.stop_token_ids == {8, 9}
    assert request.ignore_eos


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63), 0])
def test_seeds_of_64_bits(seed: int) -> None:
    backend = FakeBackend()
    complete(backend, seed=seed)
    assert parameters_of(backend.requests[0]).seed == seed % 2**64


WRONG = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"response_format": {"type": "regex", "value": "("}}, "response_format"),
]


@pytest.mark.parametrize(("request_", "param"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_value_is_refused_by_name_before_a_stream_begins(
    request_: dict[str, Any], param: str, stream: bool
) -> None:
    for ask in (complete, chat):
        backend = FakeBackend()
        status, named, message = problem(ask(backend, stream=stream, **request_))
        assert (status, named) == (400, param)
        assert param.split(".")[0].removesuffix("[0]") in message or "grammar" in message
        assert backend.requests == []


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[1, 400]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 5}, "prompt"),
    ],
)
def test_what_completions_refuse(request_: dict[str, Any], param: str) -> None:
    assert problem(complete(**request_))[:2] == (400, param)


def test_as_many_answers_as_one_likes_may_be_the_best_ones() -> None:
    assert complete(n=3, best_of=3, stream=True).status == 200
