"""Translates requests of the Messages API to chat requests.

Blocks of a message become messages as chat templates know them: results of tools are messages of their own, calls and
reasoning are fields of the assistant's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from legato.api.anthropic.requests import Block, CountTokensRequest, MessagesRequest, MessagesToolChoice
from legato.api.errors import InvalidRequest
from legato.api.openai.requests import ChatRequest
from legato.chat.answers import ReasoningWish
from legato.chat.messages import MessageList, Part, text_of
from legato.http.routes.anthropic.errors import no_threads

# Claude Code begins its system prompt with a line that is different in every request: nothing after it would be found
# in the prefix cache.
BILLING_LINE: Final = "x-anthropic-billing-header:"
# Blocks that say nothing to another model.
_IGNORED: Final = frozenset(
    {"redacted_thinking", "tool_reference", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"}
    | {"code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload"}
)
_EFFORTS: Final = {"xhigh": "high", "max": "high"}


def chat_request(request: CountTokensRequest) -> ChatRequest:
    if request.thread is not None:
        raise no_threads()
    messages = MessageList()
    messages.add_system(_system(request.system))
    for number, message in enumerate(request.messages):
        place = f"messages[{number}].content"
        blocks: list[Block] = (
            [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        )
        if message.role == "system":
            messages.add_system("\n".join(text_of(block, f"{place}[{at}]", "text") for at, block in enumerate(blocks)))
        elif message.role == "user":
            _add_user(messages, blocks, place)
        else:
            _add_answer(messages, blocks, place)
    fields = _generation(request) if isinstance(request, MessagesRequest) else {}
    choice, several = _choice(request.tool_choice)
    if not messages.messages:
        raise InvalidRequest("`messages` has no content", "messages")
    return ChatRequest(
        model=request.model,
        messages=messages.messages,
        tools=_tools(request) or None,
        tool_choice=choice,
        parallel_tool_calls=several,
        response_format=_format(request),
        **fields,
    )


def reasoning_wish(request: CountTokensRequest) -> ReasoningWish:
    """As in Anthropic's API, a model does not reason unless it is asked to."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return ReasoningWish(enabled=False)
    effort = None if request.output_config is None else request.output_config.effort
    return ReasoningWish(True, None if effort is None else _EFFORTS.get(effort, effort), thinking.budget_tokens)


# ---- messages --------------------------------------------------------------------------------------------------------


def _system(system: str | list[Block] | None) -> str:
    if isinstance(system, list):
        texts = [text_of(block, f"system[{number}]", "text") for number, block in enumerate(system)]
    else:
        texts = [system or ""]
    return "\n".join(kept for text in texts if (kept := _without_billing(text)))


def _without_billing(text: str) -> str:
    while text.startswith(BILLING_LINE):
        text = text.partition("\n")[2].lstrip("\n")
    return text


def _add_user(messages: MessageList, blocks: list[Block], place: str) -> None:
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        if _type(block, at) == "tool_result":
            call_id, is_error = text_of(block, at, "tool_use_id"), block.get("is_error") is True
            messages.add_result(call_id, _result(block, at), at, is_error=is_error)
        else:
            parts += _parts(block, at)
    if parts:
        messages.add_user(parts)


def _parts(block: Block, place: str) -> list[Part]:
    kind = _type(block, place)
    if kind == "text":
        return [{"type": "text", "text": text_of(block, place, "text")}]
    if kind == "image":
        return [_image(block, place)]
    if kind == "document":
        return [{"type": "text", "text": _document(block, place)}]
    if kind in _IGNORED:
        return []
    raise InvalidRequest(f"`{place}.type` is {kind!r}, which this server does not support", f"{place}.type")


def _image(block: Block, place: str) -> Part:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        data, media_type = (text_of(source, f"{place}.source", name) for name in ("data", "media_type"))
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    if kind == "url":
        return {"type": "image_url", "image_url": {"url": text_of(source, f"{place}.source", "url")}}
    raise InvalidRequest(f"`{place}.source.type` must be base64 or url", f"{place}.source.type")


def _document(block: Block, place: str) -> str:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise InvalidRequest(
            f"`{place}.source.type` must be text: this server does not support files", f"{place}.source.type"
        )
    return text_of(source, f"{place}.source", "data")


def _result(block: Block, place: str) -> list[Part]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise InvalidRequest(f"`{place}.content` must be a string or a list of blocks", f"{place}.content")
    return [part for at, inner in enumerate(content) for part in _parts(inner, f"{place}.content[{at}]")]


def _add_answer(messages: MessageList, blocks: list[Block], place: str) -> None:
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        kind = _type(block, at)
        if kind == "text":
            messages.add_answer(text_of(block, at, "text"))
        elif kind == "thinking":
            messages.add_reasoning(text_of(block, at, "thinking"))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise InvalidRequest(f"`{at}.input` must be an object", f"{at}.input")
            arguments = msgspec.json.encode(given).decode()
            messages.add_call(text_of(block, at, "id"), text_of(block, at, "name"), arguments)
        elif kind not in _IGNORED:
            raise InvalidRequest(f"`{at}.type` is {kind!r}, which is not supported in assistant messages", f"{at}.type")


def _type(block: Any, place: str) -> str:
    if not isinstance(block, dict):
        raise InvalidRequest(f"`{place}` must be an object with a `type`", place)
    return text_of(block, place, "type")


# ---- everything else -------------------------------------------------------------------------------------------------


def _tools(request: CountTokensRequest) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in request.tools or []
        if tool.input_schema is not None
    ]


def _choice(choice: MessagesToolChoice | None) -> tuple[Any, bool | None]:
    """OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    several = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return {"auto": None, "any": "required", "none": "none"}[choice.type], several
    if choice.name is None:
        raise InvalidRequest("`tool_choice.name` must be the name of a tool", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}, several


def _format(request: CountTokensRequest) -> Any:
    format = None if request.output_config is None else request.output_config.format
    return None if format is None else {"type": "json_schema", "json_schema": {"schema": format.schema}}


def _generation(request: MessagesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
