"""Requests of the Responses API as chats: items become messages as chat templates know them."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from typing import Any, Final

import msgspec

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import ChatRequest
from legato.api.responses.requests import ResponsesRequest, TextOptions
from legato.chat.answers import ReasoningWish
from legato.chat.messages import MessageList, Part, text_of
from legato.http.routes.openai.errors import unsupported
from legato.http.routes.responses.tools import INPUT, ResponseTools, tool_choice
from legato.http.shapes import decoded_shape

Item = dict[str, Any]
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
REFERENCE: Final = "item_reference"
_ENCRYPTED_PREFIX: Final = "legato1."
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def own_items(request: ResponsesRequest) -> list[Item]:
    """What the request itself brings, without what it continues."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def references_in(items: list[Item]) -> list[str]:
    """Ids of the items of earlier responses that stand for them."""
    found = [
        text_of(item, f"input[{number}]", "id") for number, item in enumerate(items) if item.get("type") == REFERENCE
    ]
    if len(set(found)) < len(found):
        twice, _ = Counter(found).most_common(1)[0]
        raise InvalidRequest(f"`input` has more than one reference to the item {twice!r}", "input")
    return found


def chat_request(request: ResponsesRequest, history: list[Item], tools: ResponseTools) -> ChatRequest:
    """`history` are the items of the responses that this one continues."""
    for name in ("prompt", "conversation"):
        if getattr(request, name) is not None:
            raise unsupported(name)
    messages = MessageList()
    messages.add_system(request.instructions or "")
    for item in history:
        _add(messages, item, "previous_response_id", tools)
    for number, item in enumerate(own_items(request)):
        _add(messages, item, f"input[{number}]", tools)
    if not messages.messages:
        raise InvalidRequest("`input` must not be empty", "input")
    logprobs = LOGPROBS in (request.include or ())
    return ChatRequest(
        model=request.model,
        messages=messages.messages,
        tools=tools.functions or None,
        tool_choice=tool_choice(request.tool_choice, tools) if tools.functions else None,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        add_generation_prompt=True,
    )


def reasoning_wish(request: ResponsesRequest) -> ReasoningWish:
    effort = None if request.reasoning is None else request.reasoning.effort
    return ReasoningWish(None, "xhigh" if effort == "max" else effort)


def _format(text: TextOptions | None) -> Any:
    """As `response_format`, which has the schema one level further down."""
    if text is None or text.format is None:
        return None
    shape = decoded_shape(text.format, "text.format")
    if not isinstance(shape, dict):
        raise InvalidRequest("`text.format` must be an object with a `type`", "text.format")
    kind = shape.get("type")
    if kind == "json_schema":
        schema = shape.get("schema")
        if not isinstance(schema, dict):
            raise InvalidRequest("`text.format.schema` must be a JSON schema", "text.format.schema")
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if kind not in ("text", "json_object"):
        raise InvalidRequest("`text.format.type` must be text, json_object or json_schema", "text.format.type")
    return {"type": kind}


# ---- items -----------------------------------------------------------------------------------------------------------


def _add(messages: MessageList, item: Item, place: str, tools: ResponseTools) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, place)
        case "reasoning":
            messages.add_reasoning(_reasoning(item, place))
        case "function_call":
            name = tools.name_of(text_of(item, place, "name"), item.get("namespace"))
            messages.add_call(text_of(item, place, "call_id"), name, text_of(item, place, "arguments"))
        case "custom_tool_call":
            arguments = msgspec.json.encode({INPUT: text_of(item, place, "input")}).decode()
            messages.add_call(text_of(item, place, "call_id"), text_of(item, place, "name"), arguments)
        case "function_call_output" | "custom_tool_call_output":
            parts = _parts(item.get("output"), f"{place}.output")
            messages.add_result(text_of(item, place, "call_id"), parts, place)
        case str():  # of tools that run elsewhere: they say nothing to another model
            pass
        case _:
            raise InvalidRequest(f"`{place}.type` must be a string", f"{place}.type")


def _add_message(messages: MessageList, item: Item, place: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f"`{place}.role` must be user, assistant, system or developer", f"{place}.role")
    parts = _parts(content, f"{place}.content")
    if role == "user":
        messages.add_user(parts)
        return
    if any(part["type"] != "text" for part in parts):
        raise InvalidRequest(
            f"`{place}.content` has an image, and only user messages may have images", f"{place}.content"
        )
    text = "".join(part["text"] for part in parts)
    if role == "assistant":
        messages.add_answer(text)
    else:
        messages.add_system(text)


def _parts(content: object, place: str) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"`{place}` must be a string or a list of parts", place)
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: object, place: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return {"type": "text", "text": text_of(part, place, "text")}
    if kind == "refusal":
        return {"type": "text", "text": text_of(part, place, "refusal")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": text_of(part, place, "image_url")}}
    raise InvalidRequest(f"`{place}.type` must be input_text, output_text, refusal or input_image", f"{place}.type")


def _reasoning(item: Item, place: str) -> str:
    """From wherever the item has it."""
    hidden = item.get("encrypted_content")
    if isinstance(hidden, str) and (text := disclosed(hidden)) is not None:
        return text
    for field in ("content", "summary"):
        if item.get(field):
            return "".join(part.get("text", "") for part in _parts(item[field], f"{place}.{field}"))
    return ""


def encrypted(text: str) -> str:
    """Nothing is secret about it: it only has to come back as it was."""
    return _ENCRYPTED_PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def disclosed(content: str) -> str | None:
    """None for what another server has made."""
    if not content.startswith(_ENCRYPTED_PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(_ENCRYPTED_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
