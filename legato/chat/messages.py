"""Builds the messages for a chat template from the items of another API.

Templates are particular: one system message, the first; user and assistant in turns; a call in the message of the
assistant that made it. Other APIs have a list of blocks or items in any order.
"""

from __future__ import annotations

from typing import Any

from legato.api.errors import InvalidRequest

Message = dict[str, Any]
Part = dict[str, Any]


class MessageList:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls: set[str] = set()

    def add_system(self, text: str) -> None:
        """Once the conversation has begun, a template has no place for it: then the user says it."""
        if not text:
            return
        if not self.messages:
            self.messages.append({"role": "system", "content": text})
        elif len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add_user([{"type": "text", "text": text}])

    def add_user(self, parts: list[Part]) -> None:
        """Texts, and images as OpenAI has them."""
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": ""})
        message = self.messages[-1]
        known = message["content"]
        before: list[Part] = known if isinstance(known, list) else [{"type": "text", "text": known}] if known else []
        message["content"] = _joined([*before, *parts])

    def add_result(self, call_id: str, parts: list[Part], place: str, *, is_error: bool = False) -> None:
        """Of a call. Templates know results that are texts, so images follow them. `place` is the client's name for
        it."""
        if call_id not in self._calls:  # the model would see the result of a call that was never made
            raise InvalidRequest(f"`{place}` has the result of {call_id!r}, but no earlier call has that id", place)
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        content = f"Error: {text}" if is_error else text
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        if images := [part for part in parts if part["type"] != "text"]:
            self.add_user(images)

    def add_reasoning(self, text: str) -> None:
        if text:
            message = self._assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_answer(self, text: str) -> None:
        message = self._assistant()
        message["content"] += text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        self._calls.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def text_of(item: object, place: str, field: str) -> str:
    """A field that must be a string. `place` is the client's name for what has it."""
    value = item.get(field) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise InvalidRequest(f"`{place}.{field}` must be a string", f"{place}.{field}")
    return value


def _joined(parts: list[Part]) -> str | list[Part]:
    """Texts that follow each other, in one."""
    joined: list[Part] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n\n{part['text']}"}
        else:
            joined.append(part)
    if len(joined) == 1 and joined[0]["type"] == "text":
        return str(joined[0]["text"])
    return joined
