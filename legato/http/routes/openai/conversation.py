"""Messages to a prompt, through the model's chat template."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from legato.api.errors import InvalidRequest
from legato.api.native import SimpleToken
from legato.api.openai.requests import EFFORTS, ChatRequest
from legato.chat.answers import ChatFormat, ReasoningWish
from legato.chat.template import TemplateError
from legato.chat.tools.requests import ToolUse, tool_use_of
from legato.chat.tools.tooling import ChatRenderer, Tooling
from legato.http.inference import Inference
from legato.vision.prompts import PromptImage, in_messages


def check_conversation(request: ChatRequest) -> None:
    """What can be said without the template."""
    if not request.messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    for number, message in enumerate(request.messages):
        place = f"messages[{number}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"`{place}.role` must be a string", f"{place}.role")
        _check_content(message, f"{place}.content")
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` are mutually exclusive", "continue_final_message"
        )
    _check_results(request.messages)


def _check_content(message: dict[str, Any], place: str) -> None:
    content = message.get("content")
    if not isinstance(content, str | list | None) or (content is None and message["role"] in ("user", "system")):
        raise InvalidRequest(f"`{place}` must be a string or a list of parts", place)
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            raise InvalidRequest(f"`{place}[{number}]` must be an object with a `type`", f"{place}[{number}]")
        if part.get("type", "text") == "text" and not isinstance(part.get("text"), str):
            raise InvalidRequest(f"`{place}[{number}].text` must be a string", f"{place}[{number}].text")


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Without this, the model would see the result of a call that was never made."""
    made: set[str] = set()
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            made |= {str(call.get("id")) for call in calls if isinstance(call, dict)}
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(call_id, str) and call_id not in made:
            place = f"messages[{number}].tool_call_id"
            raise InvalidRequest(f"`{place}` is {call_id!r}, but no earlier message has a call with that id", place)


def continues(request: ChatRequest) -> bool:
    """Whether the model goes on with the last message. Like TGI it does so with one of its own, unless told not to."""
    if request.continue_final_message is not None:
        return request.continue_final_message
    return request.add_generation_prompt is None and bool(last_answer(request))


def last_answer(request: ChatRequest) -> str:
    """The text of the last message if that is the assistant's, else nothing."""
    last = request.messages[-1]
    content: Any = last.get("content") if last["role"] == "assistant" else None
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def tool_use(request: ChatRequest) -> ToolUse | None:
    use = tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls, request.tool_prompt)
    if use is not None and len(use.names) < len(use.tools):
        twice, _ = Counter(tool.name for tool in use.tools).most_common(1)[0]
        raise InvalidRequest(f"`tools` has more than one function of the name {twice!r}", "tools")
    return use


def reasoning_wish(request: ChatRequest) -> ReasoningWish:
    effort = request.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(f"`reasoning_effort` must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    return ReasoningWish(None, effort, request.thinking_token_budget)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    ids: list[int]
    images: tuple[PromptImage, ...] = ()


async def read_conversation(
    request: ChatRequest, inference: Inference, format: ChatFormat, use: ToolUse | None, wish: ReasoningWish
) -> ChatPrompt:
    """Templates write the special tokens themselves, one for each image."""
    template = _template(inference)
    validator = inference.validator
    messages, sources = in_messages(request.messages, has_vision=validator.images is not None)
    request = msgspec.structs.replace(_with_variables(request, format, wish), messages=messages)

    def read() -> tuple[str, list[int]]:
        text = _render(request, template, format.tooling, use)
        if validator.images is not None:
            text = validator.images.rules.written(text)
        return text, validator.encode(text, add_special_tokens=False).ids

    text, ids = await validator.in_thread(read, _size(request))
    if not ids:
        raise InvalidRequest("the chat template renders `messages` to an empty prompt", "messages")
    if validator.images is None:
        return ChatPrompt(text, ids)
    images = await validator.images.read(sources, validator.limits.max_input_tokens)
    return ChatPrompt(text, *validator.images.place(ids, images))


async def count_tokens(
    request: ChatRequest, inference: Inference, format: ChatFormat, wish: ReasoningWish, size: int, tenant: str
) -> int:
    """Of the prompt, images included. `size` is that of the request in bytes."""
    check_conversation(request)
    async with inference.concurrency.validating(size, tenant):
        prompt = await read_conversation(request, inference, format, tool_use(request), wish)
    return len(prompt.ids)


async def tokenize_conversation(
    request: ChatRequest, inference: Inference, format: ChatFormat
) -> tuple[str, list[SimpleToken]]:
    """The rendered prompt, with placeholders of images, and its tokens, with those of the images."""
    use = tool_use(request)
    template = _template(inference)
    validator = inference.validator
    messages, sources = in_messages(request.messages, has_vision=validator.images is not None)
    request = msgspec.structs.replace(_with_variables(request, format, reasoning_wish(request)), messages=messages)

    def read() -> tuple[str, list[SimpleToken]]:
        text = _render(request, template, format.tooling, use)
        if validator.images is not None:
            text = validator.images.rules.written(text)
        return text, validator.offsets(text, add_special_tokens=False)

    text, tokens = await validator.in_thread(read, _size(request))
    if validator.images is None or not sources:
        return text, tokens
    images = await validator.images.read(sources, validator.limits.max_input_tokens)
    return text, validator.images.repeated(tokens, images)


def _with_variables(request: ChatRequest, format: ChatFormat, wish: ReasoningWish) -> ChatRequest:
    """What a request says to the template in so many words counts more than what follows from its effort."""
    kwargs = {**format.variables(wish), **(request.chat_template_kwargs or {})} or None
    return msgspec.structs.replace(request, chat_template_kwargs=kwargs)


def _size(request: ChatRequest) -> int:
    """Characters of the texts."""
    return sum(len(content) for message in request.messages if isinstance(content := message.get("content"), str))


def _template(inference: Inference) -> ChatRenderer:
    if inference.chat_template is None:
        raise TemplateError("template not found: the model has none, give one with --tokenizer-config-path")
    return inference.chat_template


def _render(request: ChatRequest, template: ChatRenderer, tooling: Tooling, use: ToolUse | None) -> str:
    try:
        messages = tooling.history.messages(request.messages, use)
    except RecursionError:
        raise InvalidRequest("`messages` are nested too deeply", "messages") from None
    continued = continues(request)
    prompt = request.add_generation_prompt
    return template.render(
        messages,
        tools=tooling.history.tools(use),
        documents=request.documents,
        add_generation_prompt=not continued if prompt is None else prompt,
        continue_final_message=continued,
        kwargs=request.chat_template_kwargs,
    )
