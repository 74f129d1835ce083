"""Rows 11 to 13 of the fault table: numbers that are none, negative, or far too large."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.http.routes.openai.options import MAX_CHOICES
from legato.ipc.settings import RouterSettings
from tests.faults.scale import cases
from tests.http.asgi import Answer, ask
from tests.http.routes.openai.fakes import CHAT, COMPLETIONS, HI, Server

# field -> the smallest and the largest number that is fine; None where a 32-bit float or the model's limit decides.
NATIVE_FLOATS = {
    "temperature": (1e-30, 1e30),
    "repetition_penalty": (1e-30, 1e30),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "top_p": (1e-30, 1),
    "typical_p": (1e-30, 1),
    "min_p": (0, 1),
}
OPENAI_FLOATS = {**NATIVE_FLOATS, "temperature": (0, 1e30), "top_p": (0, 1)}
INTEGERS = ("top_k", "best_of", "max_new_tokens", "seed", "top_n_tokens", "truncate")
WORST = [-1, -1e308, 1e308, 1.8e308, -1.8e308, 1e999, -1e999, 2**63, 2**64, -(2**63), -(2**64), 10**400]
numbers = (
    st.sampled_from(WORST) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
)  # fmt: skip


def text_of(number: float) -> str:
    """As a client may write it: infinities as numbers that are too large."""
    return f"{'-' if number < 0 else ''}1e999" if isinstance(number, float) and math.isinf(number) else str(number)


def native(field: str, number: str) -> Answer:
    return ask("/generate", f'{{"inputs": "hi", "parameters": {{"{field}": {number}}}}}'.encode())


def openai(path: str, field: str, number: str) -> Answer:
    rest = json.dumps({"messages": HI} if path == CHAT else {"prompt": "hi"})
    return Server().ask(path, f'{{"{field}": {number}, {rest[1:]}'.encode())


# ---- row 11 ----------------------------------------------------------------------------------------------------------


@settings(max_examples=cases(full=5000, quick=150), deadline=None, derandomize=True)
@given(st.sampled_from(list(NATIVE_FLOATS)), numbers)
def test_a_native_number_is_fine_or_refused_by_the_name_of_its_field(field: str, number: float) -> None:
    answer = native(field, text_of(number))
    smallest, largest = NATIVE_FLOATS[field]
    if smallest <= number <= largest:
        assert answer.status == 200, answer.body
    elif not (0 < number < smallest or largest == 1e30):  # whatever becomes of it when it is rounded
        assert answer.status == 422
    assert answer.status in (200, 422)
    assert answer.status == 200 or field in answer.json()["error"]


@settings(max_examples=cases(full=5000, quick=100), deadline=None, derandomize=True)
@given(st.sampled_from([CHAT, COMPLETIONS]), st.sampled_from(list(OPENAI_FLOATS)), numbers)
def test_a_number_of_openais_is_fine_or_refused_by_the_name_of_its_field(path: str, field: str, number: float) -> None:
    answer = openai(path, field, text_of(number))
    smallest, largest = OPENAI_FLOATS[field]
    if smallest <= number <= largest:
        assert answer.status == 200, answer.body
    elif not (0 < number < smallest or largest == 1e30):
        assert answer.status == 400
    assert answer.status in (200, 400)
    assert answer.status == 200 or answer.json()["error"]["param"] == field


@pytest.mark.parametrize("field", [*NATIVE_FLOATS, *INTEGERS])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_by_the_name_of_its_field(field: str, number: str) -> None:
    answer = native(field, number)
    assert answer.status == 400 and f"`{field}`" in answer.json()["error"]


@pytest.mark.parametrize("field", [*INTEGERS, "logit_bias"])
@pytest.mark.parametrize("number", ["1e999", "1e308", "1.5", "-1e308", str(10**400), str(-(10**400))])
def test_an_integer_far_too_large_is_refused_by_the_name_of_its_field(field: str, number: str) -> None:
    answer = native(field, f'{{"1": {number}}}' if field == "logit_bias" else number)
    if (field, number) == ("logit_bias", "1.5"):
        assert answer.status == 200
    else:
        assert answer.status == 422 and field in answer.json()["error"]


# ---- row 12: the words are TGI's where TGI has words ---------------------------------------------------------------

TOO_LARGE = "Expected `int` <= 4294967295"
SNAPSHOTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("/generate", {"max_new_tokens": 0}, 422, "Input validation error: `max_new_tokens` must be strictly positive"),
    (
        "/generate",
        {"max_new_tokens": -1},
        422,
        "Input validation error: Expected `int` >= 0 - at `$.parameters.max_new_tokens`",
    ),
    (
        "/generate",
        {"max_new_tokens": 2**63},
        422,
        f"Input validation error: {TOO_LARGE} - at `$.parameters.max_new_tokens`",
    ),
    (
        "/generate",
        {"max_new_tokens": 1000},
        422,
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 100. "
        "Given: 3 `inputs` tokens and 1000 `max_new_tokens`",
    ),
    (CHAT, {"max_tokens": 0}, 400, "`max_tokens` must be strictly positive"),
    (CHAT, {"max_tokens": -1}, 400, "Expected `int` >= 0 - at `$.max_tokens`"),
    (CHAT, {"max_tokens": 2**63}, 400, f"{TOO_LARGE} - at `$.max_tokens`"),
    (CHAT, {"max_completion_tokens": 0}, 400, "`max_completion_tokens` must be strictly positive"),
    (COMPLETIONS, {"max_tokens": 0}, 400, "`max_tokens` must be strictly positive, unless `echo` is set"),
    (COMPLETIONS, {"max_tokens": -1}, 400, "Expected `int` >= 0 - at `$.max_tokens`"),
    (COMPLETIONS, {"max_tokens": 2**63}, 400, f"{TOO_LARGE} - at `$.max_tokens`"),
]


@pytest.mark.parametrize(("path", "fields", "status", "message"), SNAPSHOTS)
def test_a_number_of_tokens_that_cannot_be_has_its_exact_words(
    path: str, fields: dict[str, Any], status: int, message: str
) -> None:
    if path == "/generate":
        answer = ask(path, {"inputs": "hi", "parameters": fields})
        said = answer.json()["error"]
    else:
        answer = Server().ask(path, {"messages": HI, "prompt": "hi", **fields})
        said = answer.json()["error"]["message"]
    assert (answer.status, said) == (status, message)


# ---- row 13 ----------------------------------------------------------------------------------------------------------


def test_no_request_gets_more_than_eight_sequences_by_default() -> None:
    default = RouterSettings(model_id="m")
    assert max(MAX_CHOICES, default.max_best_of) <= 8
    assert default.max_top_n_tokens <= 8


@pytest.mark.parametrize("number", [9, 10**6, 2**31, 2**32 - 1])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"best_of": ..., "do_sample": True}),
        ("/generate", {"top_n_tokens": ..., "details": True}),
        (CHAT, {"n": ...}),
        (COMPLETIONS, {"n": ...}),
        (COMPLETIONS, {"best_of": ...}),
    ],
)
def test_a_huge_number_of_sequences_or_tokens_is_refused_and_nothing_runs(
    path: str, fields: dict[str, Any], number: int
) -> None:
    (name,) = (name for name, value in fields.items() if value is ...)
    asked = {**fields, name: number}
    server = Server()
    body = {"inputs": "hi", "parameters": asked} if path == "/generate" else {"messages": HI, "prompt": "hi", **asked}
    answer = server.ask(path, body)
    assert answer.status == (422 if path == "/generate" else 400)
    assert f"`{name}`" in str(answer.json()["error"])
    assert not server.backend.requests
