from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from legato.scheduling.state import FinishReason, Output
from tests.generation import admission_of
from tests.http.asgi import EOS, LIMITS, FakeBackend, outputs_of, token_ids
from tests.http.routes.openai.fakes import CHAT, HI, FakeTemplate, Server, chat, chunks, problem


def rendered(**request: Any) -> dict[str, Any]:
    """How the template was asked."""
    template = FakeTemplate()
    backend = FakeBackend(limits=replace(LIMITS, max_input_tokens=1000, max_total_tokens=2000))
    answer = Server(backend, template=template).ask(CHAT, {"messages": HI, **request})
    assert answer.status == 200, answer.body
    (asked,) = template.asked
    return asked


def test_an_answer_field_by_field() -> None:
    answer = chat(model="tgi").json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    answer.pop("created")
    prompt_tokens = len(token_ids("user:hi;assistant:"))
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "0.1.0-native",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"accepted_prediction_tokens": 0},
        },
    }


def test_the_prompt_is_what_the_template_writes_and_nothing_is_added() -> None:
    backend = FakeBackend()
    answer = chat(backend)
    assert backend.requests[0].input_ids == token_ids("user:hi;assistant:")
    assert answer.headers["x-compute-characters"] == str(len("user:hi;assistant:"))


def test_messages_reach_the_template_as_they_are() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert rendered(messages=messages)["messages"] == messages


def test_template_variables_and_documents_are_handed_on() -> None:
    asked = rendered(chat_template_kwargs={"enable_thinking": False}, documents=[{"title": "t"}])
    assert asked["kwargs"] == {"enable_thinking": False}
    assert asked["documents"] == [{"title": "t"}]


ANSWERED = [*HI, {"role": "assistant", "content": "I am"}]


@pytest.mark.parametrize(
    ("request_", "generation_prompt", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"messages": ANSWERED}, False, True),
        ({"messages": ANSWERED, "add_generation_prompt": True}, True, False),
        ({"messages": ANSWERED, "continue_final_message": False}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, True, False),
    ],
)
def test_whether_the_last_message_is_continued(
    request_: dict[str, Any], generation_prompt: bool, continues: bool
) -> None:
    asked = rendered(**request_)
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == (generation_prompt, continues)


def test_echo_gives_the_continued_message_as_a_whole() -> None:
    answer = chat(messages=[*HI, {"role": "assistant", "content": [{"type": "text", "text": "I say "}]}], echo=True)
    assert answer.json()["choices"][0]["message"]["content"] == "I say hello world"
    events = chunks(chat(messages=ANSWERED, echo=True, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "I amhello world"


def test_max_completion_tokens_comes_before_its_older_name() -> None:
    for request, expected in [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({}, 100 - len(token_ids("user:hi;assistant:"))),
    ]:
        backend = FakeBackend()
        chat(backend, **request)
        assert backend.requests[0].max_new_tokens == expected


def test_several_answers_to_one_conversation() -> None:
    answer = chat(FakeBackend(lambda request: outputs_of(f"answer {request.id}")), n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["answer 1", "answer 2", "answer 3"]
    assert answer["usage"]["prompt_tokens"] == len(token_ids("user:hi;assistant:"))


def test_logprobs_with_bytes_and_without_the_end_token() -> None:
    half, rest = token_ids("é")
    outputs = [
        Output(half, -0.5, [(half, -0.5), (EOS, -1.0)]),
        Output(rest, -0.25, [(rest, -0.25), (half, -2.0)]),
        Output(EOS, -0.1, [(EOS, -0.1), (half, -3.0)], finish_reason=FinishReason.EOS_TOKEN),
    ]
    backend = FakeBackend(lambda request: outputs)
    (choice,) = chat(backend, logprobs=True, top_logprobs=2).json()["choices"]
    assert admission_of(backend.requests[0]).top_n_tokens == 2
    assert choice["logprobs"]["content"] == [
        {
            "token": "bytes:\\xc3",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [
                {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
                {"token": "</s>", "logprob": -1.0, "bytes": list(b"</s>")},
            ],
        },
        {
            "token": "bytes:\\xa9",
            "logprob": -0.25,
            "bytes": [0xA9],
            "top_logprobs": [
                {"token": "bytes:\\xa9", "logprob": -0.25, "bytes": [0xA9]},
                {"token": "bytes:\\xc3", "logprob": -2.0, "bytes": [0xC3]},
            ],
        },
    ]


def test_as_many_top_logprobs_as_openai_allows() -> None:
    backend = FakeBackend()
    assert chat(backend, logprobs=True, top_logprobs=20).status == 200
    assert admission_of(backend.requests[0]).top_n_tokens == 20
    assert problem(chat(logprobs=True, top_logprobs=21))[1] == "top_logprobs"
    assert problem(chat(top_logprobs=2))[1] == "top_logprobs"


def test_a_model_without_a_template() -> None:
    for stream in (False, True):
        answer = Server(template=None).ask(CHAT, {"messages": HI, "stream": stream})
        assert answer.status == 422
        assert answer.json()["error_type"] == "template_error"
        assert answer.json()["error"]["message"].startswith("Template error: template not found")


def test_a_template_that_refuses() -> None:
    answer = Server(template=FakeTemplate(fails=True)).ask(CHAT, {"messages": HI})
    assert problem(answer) == (422, None, "Template error: roles must alternate")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "system"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_refused(request_: dict[str, Any], param: str) -> None:
    status, named, message = problem(chat(**request_))
    assert (status, named) == (400, param)
    assert message


def test_no_tools_are_no_tools() -> None:
    assert chat(tools=[], tool_choice="auto").status == chat(tools=None, tool_choice="none").status == 200


# ---- POST /chat_tokenize ---------------------------------------------------------------------------------------------


def test_chat_tokenize() -> None:
    answer = Server().ask("/chat_tokenize", {"messages": HI}).json()
    assert answer["templated_text"] == "user:hi;assistant:"
    assert [token["id"] for token in answer["tokenize_response"]] == token_ids("user:hi;assistant:")
    assert answer["tokenize_response"][-1]["stop"] == len("user:hi;assistant:")


def test_chat_tokenize_answers_with_tgis_errors() -> None:
    answer = Server(template=None).ask("/chat_tokenize", {"messages": HI})
    assert answer.status == 422
    assert answer.json()["error_type"] == "template_error"
    assert isinstance(answer.json()["error"], str)
    assert Server().ask("/chat_tokenize", {"messages": []}).status == 422
