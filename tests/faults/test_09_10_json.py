"""Rows 9 and 10 of the fault table: bodies that are not JSON, or only just, and texts that nobody would write."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from legato.http.app import create_app
from tests.chat.cases import make
from tests.faults.loop_lag import Lag
from tests.faults.scale import cases
from tests.fuzz.backend import obliging
from tests.http.asgi import LIMITS, SETTINGS, Answer, Call, FakeBackend, app_for, ask, post, tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, Any] = {
    "/generate": {"inputs": "hi", "parameters": {"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.0}}},
    "/generate_stream": {"inputs": "hi", "parameters": {"details": True, "top_n_tokens": 2}},
    "/": {"inputs": "hi", "stream": False, "parameters": None},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5, "tools": [{"function": {"name": "f"}}]},
    "/v1/completions": {"prompt": ["hi", "ho"], "n": 2, "logprobs": 1, "echo": True},
    "/tokenize": {"inputs": "hi"},
    "/chat_tokenize": {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}},
    "/invocations": {"prompt": "hi", "stream": True},
    "/vertex": {"instances": [{"inputs": "hi"}, {"messages": MESSAGES}]},
    "/v2/models/m/versions/1/infer": {"inputs": [{"name": "t", "shape": [1], "datatype": "BYTES", "data": ["hi"]}]},
}
PIECES = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1e-999", b"9" * 400, b"null", b"true", b"[]", b"{}", b'""',
    b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\\", b'"', b",", b":", b"[" * 2000,
    b'{"a":' * 2000, b'"inputs":1,', b'"inputs":null,', b"\xe2\x80\xa8", "🙂".encode(), b"-1", b"1.5", b"2147483648",
    b"18446744073709551616", b"\r\n\r\n", b"//", b"'", b"0x10", b"01", b".5", b"1.", b"+1",
]  # fmt: skip


def mutated(rng: random.Random, body: bytes) -> bytes:
    """A few bytes cut out, doubled, changed or replaced by something that parsers trip over."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(body) + 1)
        end = min(len(body), start + rng.choice((0, 0, 1, 1, 2, 5, 20)))
        piece = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(PIECES), body[start:end] * 2))
        body = body[:start] + piece + body[end:]
    return body


def is_stable(answer: Answer, path: str) -> bool:
    """An answer, or an error in the form that clients of this route know."""
    if answer.status == 200:
        return True
    if answer.status not in (400, 422) or answer.headers["content-type"] != "application/json":
        return False
    error = answer.json()
    if path.startswith("/v1/"):
        return error["error"].keys() == {"message", "type", "param", "code"} and "error_type" in error
    return error.keys() == {"error", "error_type"} and isinstance(error["error"], str)


@pytest.mark.parametrize("seed", range(4))
def test_no_bytes_whatsoever_are_an_error_of_ours(seed: int) -> None:
    """100,000 bodies, none of them answered with 500 or in an unknown form."""
    template = make("{% for m in messages %}{{ m.content }}{% endfor %}")

    async def main() -> None:
        app = create_app(obliging(), tokenizer(), SETTINGS, chat_template=template)
        rng = random.Random(seed)
        routes = [(path, json.dumps(request).encode()) for path, request in REQUESTS.items()]
        for _ in range(cases(full=25_000, quick=2_500)):
            path, body = rng.choice(routes)
            body = mutated(rng, body)
            answer = await post(app, path, body)
            assert is_stable(answer, path), (path, body, answer)

    try:
        asyncio.run(main())
    finally:
        template.close()


DEEP = b"[" * 100_000 + b"]" * 100_000
STRANGE = {
    "nothing": (b"", 400),
    "half of it": (b'{"inputs": "hi"', 400),
    "more than one": (b'{"inputs": "hi"} {"inputs": "hi"}', 400),
    "NaN": (b'{"inputs": "hi", "parameters": {"temperature": NaN}}', 400),
    "infinity": (b'{"inputs": "hi", "parameters": {"temperature": 1e999}}', 422),
    "a lone surrogate": (b'{"inputs": "\\ud800"}', 422),
    "a lone surrogate, encoded": (b'{"inputs": "\xed\xa0\x80"}', 400),
    "100,000 levels": (b'{"inputs": "hi", "x": ' + DEEP + b"}", 400),
    "100,000 levels where something is expected": (b'{"inputs": ' + DEEP + b"}", 422),
    "invalid UTF-8": (b'{"inputs": "\xff\xfe"}', 400),
    "a byte order mark before it": (b'\xef\xbb\xbf{"inputs": "hi"}', 400),
    "UTF-16": ('{"inputs": "hi"}'.encode("utf-16"), 400),
    "the last of two keys counts": (b'{"inputs": 1, "inputs": "hi"}', 422),
}


@pytest.mark.parametrize("name", STRANGE)
def test_each_kind_of_strange_json_has_its_status(name: str) -> None:
    body, status = STRANGE[name]
    answer = ask("/generate", body)
    assert (answer.status, answer.json()["error_type"]) == (status, "validation")


def test_of_two_equal_keys_the_last_counts() -> None:
    backend = FakeBackend()
    assert ask("/generate", b'{"inputs": "a", "inputs": "bc"}', backend).status == 200
    assert backend.requests[0].input_ids == tokenizer().encode("bc").ids


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_refused_with_its_field(number: str) -> None:
    answer = ask("/generate", f'{{"inputs": "hi", "parameters": {{"top_p": {number}}}}}'.encode())
    assert answer.status == 400
    assert f"`top_p` is {number.removeprefix('-')}" in answer.json()["error"]


# ---- row 10 ----------------------------------------------------------------------------------------------------------

TEXTS = {
    "NUL": "a\x00b",
    "a byte order mark": "\ufeffa",
    "right to left": "\u202eevil\u202c שלום עליכם",
    "not characters": "\uffff\ufffe\U0010ffff",
    "marks without end": "e" + "\u0301" * 500,
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "a family": "👩‍👩‍👧‍👦" * 8,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_strange_text_is_tokenized_like_any_other(name: str) -> None:
    text = TEXTS[name]
    answer = ask("/tokenize", {"inputs": text})
    assert answer.status == 200
    # The first token is the tokenizer's own, and has no place in the text.
    said = sorted({(token["start"], token["stop"]) for token in answer.json()[1:]})
    assert said[0][0] == 0 and said[-1][1] == len(text.encode())


@pytest.mark.parametrize("name", TEXTS)
def test_a_strange_text_comes_back_as_it_was(name: str) -> None:
    backend = FakeBackend(limits=replace(LIMITS, max_input_tokens=5000, max_total_tokens=6000))
    body = {"inputs": TEXTS[name], "parameters": {"return_full_text": True}}
    answer = ask("/generate", body, backend)
    assert answer.json()["generated_text"] == TEXTS[name] + "hello world"


@pytest.mark.usefixtures("small_heap")
def test_ten_megabytes_of_one_word_are_refused_and_nobody_waits() -> None:
    """Over the limit of any body by default; where an operator allows it, it is too long for the model."""

    async def main() -> float:
        word = json.dumps({"inputs": "x" * 10_000_000}).encode()
        assert (await post(app_for(), "/generate", word)).status == 413
        app, lag = app_for(payload_limit=20_000_000), Lag()
        refused = Call(app, "POST", "/generate", [word])
        await lag.during(refused.task)
        assert refused.sent[0]["status"] == 422
        return lag.worst

    assert asyncio.run(main()) < 0.2
