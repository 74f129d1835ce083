"""Short words for OpenAI's client, shared by its suites."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai

from tests.clients.served import MESSAGES, MODEL, PROMPT, URL


def client_of(url: str = URL, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


CLIENT = client_of()


def chat(messages: Any = MESSAGES, **fields: Any) -> Any:
    fields = {"max_tokens": 30, "temperature": 0, **fields}
    return CLIENT.chat.completions.create(model=MODEL, messages=messages, **fields)


def complete(prompt: Any = PROMPT, **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0, **fields}
    return CLIENT.completions.create(model=MODEL, prompt=prompt, **fields)


def said(chunks: Iterable[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
