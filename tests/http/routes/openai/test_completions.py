from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from tokenizers import Tokenizer

from legato.api.openai.requests import ChatRequest, CompletionRequest
from legato.http.app import create_app
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.text.infill import KNOWN, InfillFormat
from tests.generation import admission_of, parameters_of
from tests.http.asgi import EOS, SETTINGS, Answer, FakeBackend, outputs_of, post, token_ids, tokenizer
from tests.http.routes.openai.fakes import COMPLETIONS, Server, chat, chunks, complete, problem

LENGTH = FinishReason.LENGTH


def scored(text: str, **first: Any) -> FakeBackend:
    """Says a text of which every token has two likeliest ones."""

    def script(request: GenerationRequest) -> list[Output]:
        outputs = outputs_of(text, LENGTH, logprob=-0.5)
        for output in outputs:
            output.top_tokens = [(output.token_id, -0.5), (EOS, -2.0)][: admission_of(request).top_n_tokens]
        for name, value in first.items():
            setattr(outputs[0], name, value)
        return outputs

    return FakeBackend(script)


# ---- one answer ------------------------------------------------------------------------------------------------------


def test_an_answer_field_by_field() -> None:
    answer = complete(model="any name").json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer.pop("id"))
    assert abs(answer.pop("created") - time.time()) < 5
    assert answer == {
        "object": "text_completion",
        "model": "tiny",  # TGI's answer, whatever the request says
        "system_fingerprint": "0.1.0-native",
        "choices": [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"accepted_prediction_tokens": 0},
        },
    }


def test_ids_are_unique_and_the_model_is_named_where_the_request_names_none() -> None:
    first, second = complete().json(), complete().json()
    assert first["id"] != second["id"]
    assert first["model"] == "tiny"


def test_the_fingerprint_tells_the_version_and_the_image() -> None:
    server = Server(settings={"version": "1.2.3", "docker_label": "sha-1"})
    assert server.ask(COMPLETIONS, {"prompt": "hi"}).json()["system_fingerprint"] == "1.2.3-sha-1"


def test_cached_prompt_tokens_are_counted() -> None:
    usage = complete(scored("x", num_cached=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_accepted_drafts_are_counted() -> None:
    usage = complete(scored("hello", is_draft=True)).json()["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 1}


def test_headers_are_tgis() -> None:
    headers = complete(prompt=["hi", "hé!"]).headers
    assert headers["x-compute-characters"] == "5"
    assert headers["x-prompt-tokens"] == str(2 + len(token_ids("hi")) + len(token_ids("hé!")))
    assert headers["x-generated-tokens"] == "8"
    assert all(headers[f"x-{name}-time"].isdigit() for name in ("total", "validation", "queue", "inference"))


@pytest.mark.parametrize(
    ("finish", "reason"), [(LENGTH, "length"), (FinishReason.EOS_TOKEN, "stop"), (FinishReason.STOP_SEQUENCE, "stop")]
)
def test_finish_reasons_are_openais(finish: FinishReason, reason: str) -> None:
    backend = FakeBackend(lambda request: outputs_of("hello", finish))
    assert complete(backend).json()["choices"][0]["finish_reason"] == reason


def test_nulls_and_unknown_fields_are_accepted() -> None:
    for ask, kind, needed in ((complete, CompletionRequest, "prompt"), (chat, ChatRequest, "messages")):
        nulls = {name: None for name in kind.__struct_fields__ if name != needed}
        assert ask(**nulls, some_future_field={"x": 1}).status == 200


# ---- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["o w", ["xyz", "o w"]])
def test_stop_strings_are_not_part_of_the_text(stop: Any) -> None:
    backend = FakeBackend(lambda request: outputs_of("hello world and so on"))
    (choice,) = complete(backend, stop=stop).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hell", "stop")
    assert backend.cancelled == [1]


def test_a_stop_string_in_the_last_token_is_the_reason() -> None:
    (choice,) = complete(FakeBackend(lambda request: outputs_of("hello", LENGTH)), stop="lo").json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hel", "stop")


def test_a_stop_token_is_not_part_of_the_text() -> None:
    world = token_ids(" world")[0]

    def script(request: GenerationRequest) -> list[Output]:
        assert request.stop_token_ids == {world}
        return outputs_of("hello world", FinishReason.STOP_SEQUENCE)

    assert complete(FakeBackend(script), stop_token_ids=[world]).json()["choices"][0]["text"] == "hello"


def test_stop_strings_among_the_first_tokens_are_just_text() -> None:
    backend = FakeBackend(lambda request: outputs_of("hello world hello world", LENGTH))
    (choice,) = complete(backend, stop="world", min_tokens=3).json()["choices"]
    assert choice["text"] == "hello world hello "


# ---- several prompts and answers -------------------------------------------------------------------------------------


def test_prompts_are_texts_or_token_ids_or_several_of_either() -> None:
    ids = token_ids("hello")
    for prompt, expected in [
        ("hello", [[0, *ids]]),
        (["hello"], [[0, *ids]]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
        (["hello", "hello"], [[0, *ids]] * 2),
    ]:
        backend = FakeBackend()
        assert complete(backend, prompt=prompt).status == 200
        assert [request.input_ids for request in backend.requests] == expected


def test_every_prompt_has_its_choices_in_order() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return outputs_of(f"{'ab'[request.input_ids[-1] == 7]}{request.id}")

    answer = complete(FakeBackend(script), prompt=[[5], [7]], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "a1"),
        (1, "a2"),
        (2, "b3"),
        (3, "b4"),
    ]
    assert answer["usage"]["prompt_tokens"] == 2


def test_seeds_follow_each_other_and_do_not_depend_on_other_prompts() -> None:
    def seeds(**request: Any) -> list[int]:
        backend = FakeBackend()
        assert complete(backend, **request).status == 200
        return [parameters_of(each).seed for each in backend.requests]

    assert seeds(seed=7, n=2, prompt=["a", "b"]) == [7, 8, 7, 8]
    assert seeds(seed=-1, n=2) == [2**64 - 1, 0]
    assert len(set(seeds(n=2, prompt=["a", "b"]))) == 4


def test_best_of_returns_the_likeliest_and_counts_them_all() -> None:
    logprobs = {1: -0.9, 2: -0.1, 3: -0.5}
    backend = FakeBackend(lambda request: outputs_of(str(request.id), logprob=logprobs[request.id]))
    server = Server(backend, settings={"max_best_of": 3})
    answer = server.ask(COMPLETIONS, {"prompt": "hi", "n": 2, "best_of": 3}).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "2"), (1, "3")]
    assert answer["usage"]["completion_tokens"] == 6


def test_all_choices_together_need_permits() -> None:
    body = {"prompt": ["a", "b"], "n": 2}
    assert Server(settings={"max_concurrent_requests": 4}).ask(COMPLETIONS, body).status == 200
    refused = Server(settings={"max_concurrent_requests": 3}).ask(COMPLETIONS, body)
    assert refused.status == 400, "it will never fit, so trying again is of no use"


# ---- logprobs and echo -----------------------------------------------------------------------------------------------


def test_logprobs_of_what_was_generated() -> None:
    (choice,) = complete(scored("hello"), logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["he", "llo"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"he": -0.5, "</s>": -2.0}, {"llo": -0.5, "</s>": -2.0}],
        "text_offset": [0, 2],
    }


def test_the_chosen_token_is_always_among_the_top_ones() -> None:
    (choice,) = complete(scored("hello"), logprobs=0).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"he": -0.5}, {"llo": -0.5}]


def test_of_tokens_with_one_name_the_likelier_counts() -> None:
    first, second = token_ids("a")[0], token_ids("b")[0]
    outputs = [Output(second, -3.0, [(first, -0.1), (first, -0.2)], finish_reason=LENGTH)]
    (choice,) = complete(FakeBackend(lambda request: outputs), logprobs=2).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.1, "b": -3.0}]


def test_half_a_character_is_named_by_its_bytes() -> None:
    outputs = outputs_of("é", LENGTH)
    (choice,) = complete(FakeBackend(lambda request: outputs), logprobs=0).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["text"] == "é"


def test_offsets_count_text_that_a_stop_string_holds_back() -> None:
    backend = FakeBackend(lambda request: outputs_of("0123456", LENGTH))
    (choice,) = complete(backend, logprobs=0, stop="3456789").json()["choices"]
    assert choice["logprobs"]["text_offset"] == list(range(7))


def test_echo_puts_the_prompt_before_the_text() -> None:
    assert complete(prompt="hi, ", echo=True).json()["choices"][0]["text"] == "hi, hello world"
    ids = [0, *token_ids("hi, ")]
    assert complete(prompt=ids, echo=True).json()["choices"][0]["text"] == "<s>hi, hello world"


def prompt_scores() -> dict[str, Any]:
    he = token_ids("hello")[0]
    return {"prompt_logprobs": [None, -1.5, -2.5], "prompt_top_tokens": [None, [(he, -1.5)], [(EOS, -0.1)]]}


def test_echo_with_logprobs_has_those_of_the_prompt() -> None:
    """What lm-eval's local-completions asks for."""
    (choice,) = complete(
        scored("x", **prompt_scores()), prompt=[0, *token_ids("hello")], echo=True, logprobs=1, max_tokens=1
    ).json()["choices"]
    assert choice["text"] == "<s>hellox"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "he", "llo", "x"],
        "token_logprobs": [None, -1.5, -2.5, -0.5],
        "top_logprobs": [None, {"he": -1.5}, {"</s>": -0.1, "llo": -2.5}, {"x": -0.5}],
        "text_offset": [0, 3, 5, 8],
    }


def test_offsets_of_an_echoed_text_are_those_in_the_text() -> None:
    (choice,) = complete(scored("x", **prompt_scores()), prompt="hello", echo=True, logprobs=1).json()["choices"]
    assert choice["text"] == "hellox"
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 5], "<s> was added, and has no place of its own"


def test_a_shard_that_gives_no_top_tokens_for_the_prompt() -> None:
    backend = scored("x", prompt_logprobs=[None, -1.5, -2.5])
    (choice,) = complete(backend, prompt="hello", echo=True, logprobs=1).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, None, None, {"x": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all_with_echo(stream: bool) -> None:
    backend = scored("x", **prompt_scores())
    answer = complete(backend, prompt="hello", echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert backend.requests[0].max_new_tokens == 1 and backend.requests[0].prompt_logprobs
    if stream:
        events = [event["choices"][0] for event in chunks(answer)]
        assert "".join(event["text"] for event in events) == "hello"
        assert [score for event in events for score in event["logprobs"]["token_logprobs"]] == [None, -1.5, -2.5]
        assert events[-1]["finish_reason"] == "length"
    else:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -2.5]
        assert answer.json()["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_computed_only_where_somebody_sees_them() -> None:
    for request in ({"echo": True}, {"logprobs": 1}):
        backend = FakeBackend()
        complete(backend, **request)
        assert not backend.requests[0].prompt_logprobs


# ---- filling in the middle -------------------------------------------------------------------------------------------

INFILL = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def ask_with_infill(**request: Any) -> tuple[Answer, list[list[int]]]:
    """The answer of a model whose vocabulary has the tokens, and the prompts that its shard got."""
    infilling = Tokenizer.from_str(tokenizer().to_str())
    infilling.add_special_tokens(list(INFILL))
    backend = FakeBackend()
    answer = asyncio.run(post(create_app(backend, infilling, SETTINGS), COMPLETIONS, {"prompt": "hi", **request}))
    return answer, [list(prompt.input_ids) for prompt in backend.requests]


def test_a_suffix_makes_the_model_fill_in_the_middle() -> None:
    prefix, suffix, middle = range(num_tokens := tokenizer().get_vocab_size(), num_tokens + 3)
    answer, prompts = ask_with_infill(prompt=["hi", ""], suffix="the end")
    assert answer.status == 200 and len(answer.json()["choices"]) == 2
    end = [suffix, *token_ids("the end"), middle]
    assert sorted(prompts, key=len, reverse=True) == [[0, prefix, *token_ids("hi"), *end], [0, prefix, *end]]


def test_an_empty_suffix_is_none() -> None:
    assert ask_with_infill(suffix="")[1] == ask_with_infill()[1]


@pytest.mark.parametrize(("fields", "param"), [(dict(echo=True), "echo"), (dict(prompt=[5, 6]), "prompt")])
def test_what_cannot_be_combined_with_a_suffix_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    answer, prompts = ask_with_infill(suffix="end", **fields)
    assert problem(answer)[:2] == (400, param) and prompts == []


def test_a_suffix_is_refused_where_the_vocabulary_has_no_tokens_for_it() -> None:
    answer = complete(suffix="end")
    assert problem(answer)[:2] == (400, "suffix") and "filling in the middle" in problem(answer)[2]
    assert answer.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("known", KNOWN)
def test_every_infill_format_is_found_by_its_tokens(known: InfillFormat) -> None:
    found = Tokenizer.from_str(tokenizer().to_str())
    assert InfillFormat.of(found) is None
    found.add_special_tokens([known.prefix, known.suffix])
    assert InfillFormat.of(found) is None
    found.add_special_tokens([known.middle])
    assert InfillFormat.of(found) == known
