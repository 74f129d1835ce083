"""What the suites know of the servers that `check_clients.py` runs for them. Imported by every environment."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any
from urllib.request import Request, urlopen

# Serves the default model, open to everybody.
URL = os.environ["LEGATO_URL"]
# The same model for those who have a key, one request at a time.
GUARDED_URL = os.environ["LEGATO_GUARDED_URL"]
KEY = os.environ["LEGATO_KEY"]
# Reasons and calls tools, as `scripted.py` has it.
SCRIPTED_URL = os.environ["LEGATO_SCRIPTED_URL"]
# Embeds texts with all-MiniLM-L6-v2.
EMBEDDING_URL = os.environ["LEGATO_EMBEDDING_URL"]

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
# Greedily, the model says this.
ANSWER = "The capital of France is Paris."
# More tokens than the model takes.
TOO_LONG = "hello " * 9000

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
ABOUT_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ABOUT_ADA: list[Any] = [{"role": "user", "content": "Ada is 36 years old. Describe her as JSON with name and age."}]


@cache
def said_in_chat() -> tuple[str, bool]:
    """What the model says to MESSAGES, greedily, in at most 30 tokens; and whether that was all. The oracle for the
    other APIs: they are the same chat."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    request = Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"] == "stop"


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "age"}
        and isinstance(value["name"], str)
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
    )
