"""Whether a template wants the content of a message as a string or as a list of parts.

OpenAI's clients send either. A template of a text model adds strings up and prints a list as Python would; one of a
vision model may know lists only and print nothing for a string; most recent ones take both. Reading that off the
source goes wrong as soon as a macro is involved. So each template is tried out once, with either form for each role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
# Renders messages, and raises whatever the template raises.
Render = Callable[[list[Message]], str]

FIRST, SECOND = "alphaprobe", "omegaprobe"
ROLES = ("system", "user", "assistant", "tool")


class UnfitContent(Exception):
    """There is no way to say this to this template."""


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


def probe(render: Render) -> dict[str, ContentForm]:
    """The form for each role. A role that the template does not know is given text."""
    return {role: next(_forms(role, render), ContentForm()) for role in ROLES}


def _forms(role: str, render: Render) -> Iterator[ContentForm]:
    """What the ways of asking have to say. One that the template refuses in either form says nothing."""
    parts = [{"type": "text", "text": text} for text in (FIRST, SECOND)]
    for conversation in _conversations(role):
        text = FIRST in _try(render, conversation(FIRST))
        _, found, after = _try(render, conversation(parts)).partition(FIRST)
        between, found_again, _ = after.partition(SECOND)
        # A list that was printed as it stands shows its keys.
        form = ContentForm(text, parts=bool(found and found_again) and "text" not in between)
        if form.text or form.parts:
            yield form


def _try(render: Render, messages: list[Message]) -> str:
    try:
        return render(messages)
    except Exception:
        return ""


def _conversations(role: str) -> Iterator[Callable[[Any], list[Message]]]:
    """Complete conversations with one message of the role, because many templates insist on the order of roles."""
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    if role == "user":
        yield lambda content: [{"role": "user", "content": content}]
    elif role == "system":
        yield lambda content: [{"role": "system", "content": content}, question]
    elif role == "assistant":
        yield lambda content: [question, {"role": "assistant", "content": content}, question]
    else:
        # Some take the arguments of a call as an object, some as a string, and Mistral's wants ids of nine letters.
        for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
            function = {"name": "weather", "arguments": arguments}
            calls = [{"id": "call00001", "type": "function", "function": function}]
            call = {"role": "assistant", "content": "", "tool_calls": calls}
            result = {"role": "tool", "tool_call_id": "call00001", "name": "weather"}
            yield lambda content, call=call, result=result: [question, call, {**result, "content": content}, answer]  # type: ignore[misc]
