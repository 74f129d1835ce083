"""The APIs of coding agents against real processes: long conversations are found in the prefix cache, responses in the
store that the workers share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.clients.scripted import scripted

# A token is a byte.
CONVERSATION_LEN = 20_000
ANSWER = "<think>\nHm.\n</think>\n\nYes, I see."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = stores()
    with scripted(tmp_path_factory.mktemp("agents"), [("", ANSWER)]) as url:
        yield url
        assert len(stores() - before) <= 1
    assert stores() <= before  # what was stored in memory is gone when the server is


def stores() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("legato-responses-*")}


def ask(url: str, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data, {"content-type": "application/json"}, method=method)) as answer:
        return json.load(answer)


def long_text(name: str) -> str:
    words = " ".join(f"{name} line {number} of a file that an agent has read." for number in range(600))
    return words[:CONVERSATION_LEN]


def chat_turn(url: str, number: int) -> tuple[int, int]:
    messages: list[Any] = [{"role": "user", "content": long_text("chat")}]
    if number == 2:
        messages += [{"role": "assistant", "content": "Yes, I see."}, {"role": "user", "content": "Go on."}]
    usage = ask(url, "/v1/chat/completions", {"messages": messages})["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def message_turn(url: str, number: int) -> tuple[int, int]:
    """The first line of the system prompt is another one in every request."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{number}c0; cc_entrypoint=cli; cch={number * 7919:x};"
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": long_text("messages")}]}]
    if number == 2:
        messages += [{"role": "assistant", "content": "Yes, I see."}, {"role": "user", "content": "Go on."}]
    body = {
        "model": "any",
        "max_tokens": 100,
        "system": [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent."}],
        "messages": messages,
        "thinking": {"type": "adaptive"},
    }
    usage = ask(url, "/v1/messages?beta=true", body)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(url, body)
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


def count(url: str, body: dict[str, Any]) -> int:
    return int(ask(url, "/v1/messages/count_tokens", body)["input_tokens"])


def response_turn(url: str, number: int) -> tuple[int, int]:
    items: list[Any] = [{"role": "user", "content": long_text("responses")}]
    if number == 2:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes, I see."}]}
        items += [said, {"role": "user", "content": "Go on."}]
    usage = ask(url, "/v1/responses", {"input": items, "instructions": "You are an agent.", "store": False})["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("turn", [chat_turn, message_turn, response_turn])
def test_the_second_turn_of_a_long_conversation_is_cached(turn: Any, url: str) -> None:
    prompt_len, cached = turn(url, 1)
    assert prompt_len >= CONVERSATION_LEN and cached < 100
    prompt_len, cached = turn(url, 2)
    print(f"{turn.__name__}: {cached} of {prompt_len} tokens, {cached / prompt_len:.2%}")
    assert cached / prompt_len >= 0.95


def test_a_stored_response_is_continued_by_whichever_worker(url: str) -> None:
    first = ask(url, "/v1/responses", {"input": long_text("stored")})
    for _ in range(6):  # every request is another connection
        assert ask(url, f"/v1/responses/{first['id']}", method="GET") == first
    second = ask(url, "/v1/responses", {"input": "Go on.", "previous_response_id": first["id"]})
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"] >= 0.95
    assert ask(url, f"/v1/responses/{first['id']}", method="DELETE")["deleted"]
