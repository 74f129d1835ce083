"""Detects whether a template expects the content of a message as a string or as a list of parts.

OpenAI's clients send either. A template of a text model adds strings up and prints a list as Python would; one of a
vision model may know lists only and print nothing for a string; most recent ones take both. Reading that off the
source goes wrong as soon as a macro is involved. So each template is tried out once, with either form for each role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Message = dict[str, Any]
# Renders messages, and raises whatever the template raises.
Render = Callable[[list[Message]], str]

ArgumentsForm = Literal["object", "string"]

ROLES = ("system", "user", "assistant", "tool")
# Words to look for in what is rendered.
FIRST, SECOND, CITY = "alphaprobe", "omegaprobe", "Probeville"
QUESTION = {"role": "user", "content": "Hi"}


class UnfitContent(Exception):
    """Content that this chat template cannot represent."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What a template takes as the content of one role's messages."""

    text: bool = True
    parts: bool = False

    def fit(self, content: Any) -> Any:
        if isinstance(content, list) and not self.parts:
            return "".join(map(_text_of, content))
        if isinstance(content, str) and self.parts and not self.text:
            return [{"type": "text", "text": content}]
        return content


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UnfitContent(f"the chat template of this model takes text only, and a content part is of type {kind!r}")


class ContentForms:
    """What one template takes, by role."""

    def __init__(self, render: Render) -> None:
        found = {role: form for role in ROLES for form in _answers(render, role)}
        for_user = found.get("user", ContentForm())
        # A role that the template does not speak of is given text, if any is.
        self._other = for_user if not for_user.text else ContentForm()
        self._found = found

    def fit(self, message: Message) -> Message:
        if "content" not in message:
            return message
        role = message.get("role")
        form = self._found.get(role, self._other) if isinstance(role, str) else self._other
        return {**message, "content": form.fit(message["content"])}


def _answers(render: Render, role: str) -> list[ContentForm]:
    """What the template makes of the role: one form, or none where it refuses the role."""
    parts = [{"type": "text", "text": text} for text in (FIRST, SECOND)]
    for conversation in _conversations(role):
        text = FIRST in attempt(render, conversation(FIRST))
        _, first, rest = attempt(render, conversation(parts)).partition(FIRST)
        between, second, _ = rest.partition(SECOND)
        # A list that was printed as it stands shows its keys.
        form = ContentForm(text, parts=bool(first and second) and "text" not in between)
        if form.text or form.parts:
            return [form]
    return []


def attempt(render: Render, messages: list[Message]) -> str:
    try:
        return render(messages)
    except Exception:
        return ""


def _conversations(role: str) -> Iterator[Callable[[Any], list[Message]]]:
    """Complete conversations with one message of the role, because many templates insist on the order of roles."""
    if role == "user":
        yield lambda content: [{"role": "user", "content": content}]
    elif role == "system":
        yield lambda content: [{"role": "system", "content": content}, QUESTION]
    elif role == "assistant":
        yield lambda content: [QUESTION, {"role": "assistant", "content": content}, QUESTION]
    else:
        for arguments in ({"city": CITY}, f'{{"city": "{CITY}"}}'):
            yield partial(_with_tool, arguments)


def _with_tool(arguments: Any, content: Any) -> list[Message]:
    # Mistral's templates want ids of nine letters.
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": content},
        {"role": "assistant", "content": "Hello"},
    ]


def arguments_form(render: Render) -> ArgumentsForm:
    """Whether `arguments` of earlier tool calls are printed well as an object, or only as the JSON string of OpenAI."""
    as_object = attempt(render, _with_tool({"city": CITY}, "sunny"))
    if CITY in as_object and f"'{CITY}'" not in as_object:
        return "object"
    as_string = attempt(render, _with_tool(f'{{"city": "{CITY}"}}', "sunny"))
    # Printed as JSON, a string has its quotes escaped.
    return "string" if CITY in as_string and f'\\"{CITY}' not in as_string else "object"
