"""Converts tools and earlier calls to the form that the chat template expects.

A template without a word about tools has no place for either. Then the tools go into the last message that the user
wrote, earlier calls are shown in the words that the model is asked to use, and their results are told by the user.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from legato.chat.tools.dialects import Dialect
from legato.chat.tools.requests import ToolUse

Message = dict[str, Any]

PROMPT: Final = (
    "The functions above are yours to call. If calling one of them helps with the request, answer with nothing but the"
    ' JSON of that call, {"name": "the name of the function", "parameters": {"the name of a parameter": its value}},'
    " with values written out."
)


class ToolHistory:
    def __init__(self, dialect: Dialect, *, mentions_tools: bool, arguments: Literal["object", "string"]) -> None:
        """What the template is like."""
        self._dialect = dialect
        self._mentions_tools = mentions_tools
        self._arguments = arguments

    def messages(self, messages: list[Message], use: ToolUse | None) -> list[Message]:
        """New ones where anything is different."""
        fit = self._with_fitting_calls if self._mentions_tools else self._without_tools
        fitting = [fit(_with_content(message)) for message in messages]
        words = None if use is None else self._words(use)
        if words is not None:
            place = _last_of_user(messages)
            fitting[place] = _with_text(fitting[place], f"\n---\n{words}")
        return fitting

    def tools(self, use: ToolUse | None) -> list[Message] | None:
        """Those for the template."""
        if use is None or not self._mentions_tools:
            return None
        return [tool.described for tool in use.tools]

    def _words(self, use: ToolUse) -> str | None:
        if self._mentions_tools:
            return use.prompt
        described = msgspec.json.encode([tool.described for tool in use.tools]).decode()
        return f"{described}\n{PROMPT if use.prompt is None else use.prompt}"

    # ---- for templates that know tools ------------------------------------------------------------------------------

    def _with_fitting_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [self._fit_call(call) for call in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": self._fit_id(message["tool_call_id"])}
        return message

    def _fit_call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "id" in call:
            call = {**call, "id": self._fit_id(call["id"])}
        function = call.get("function")
        if isinstance(function, dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": self._fit_arguments(function["arguments"])}}
        return call

    def _fit_arguments(self, arguments: Any) -> Any:
        if self._arguments == "string":
            return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        return _parsed(arguments)

    def _fit_id(self, call_id: Any) -> Any:
        """Another id for the same call, where the template would not take the one it has."""
        length = self._dialect.id_len
        if length is None or not isinstance(call_id, str) or (len(call_id) == length and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:length]

    # ---- for templates that do not ----------------------------------------------------------------------------------

    def _without_tools(self, message: Message) -> Message:
        if message.get("role") == "tool":
            return {"role": "user", "content": message.get("content") or ""}
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return message
        written = "\n".join(self._written(call) for call in calls)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return _with_text(rest, f"\n{written}" if rest.get("content") else written)

    def _written(self, call: Any) -> str:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return msgspec.json.encode(call).decode()
        arguments = _parsed(function.get("arguments"))
        return msgspec.json.encode({"name": function.get("name"), self._dialect.arguments: arguments}).decode()


def _with_content(message: Message) -> Message:
    """An answer that ended in its reasoning, and a function that returns nothing, have null for a content. Templates
    that add texts up fail on it."""
    role, calls = message.get("role"), message.get("tool_calls")
    if message.get("content") is None and (role == "tool" or (role == "assistant" and not calls)):
        return {**message, "content": ""}
    return message


def _parsed(arguments: Any) -> Any:
    """OpenAI's clients send JSON in a string. Whatever else it may be, the template has to do with it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments


def _last_of_user(messages: list[Message]) -> int:
    """The last message that the user wrote, and not a tool; the last of all, if there is none."""
    by_user = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    return by_user[-1] if by_user else len(messages) - 1


def _with_text(message: Message, text: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": (content or "") + text}
