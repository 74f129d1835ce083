"""Messages to a prompt, through the model's chat template."""

from __future__ import annotations

from typing import Any

from legato.router.chat_template import TemplateError
from legato.router.errors import InvalidRequest
from legato.router.inference import Inference, Template
from legato.router.offsets import token_offsets
from legato.router.openai.requests import ChatRequest
from legato.router.schemas import SimpleToken
from legato.router.tools.requests import ToolUse, tool_use_of
from legato.router.tools.tooling import Tooling


def check_conversation(request: ChatRequest) -> None:
    """What can be said without the template."""
    if not request.messages:
        raise InvalidRequest("`messages` must not be empty", "messages")
    for number, message in enumerate(request.messages):
        place = f"messages[{number}]"
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"`{place}.role` must be a string", f"{place}.role")
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidRequest(f"`{place}.content` must be a string or a list of parts", f"{place}.content")
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other", "continue_final_message"
        )


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
    return tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls, request.tool_prompt)


async def read_conversation(
    request: ChatRequest, inference: Inference, tooling: Tooling, use: ToolUse | None
) -> tuple[str, list[int]]:
    """The prompt's text and tokens. Templates write the special tokens themselves."""
    template = _template(inference)

    def read() -> tuple[str, list[int]]:
        text = _render(request, template, tooling, use)
        return text, inference.validator.encode(text, add_special_tokens=False).ids

    text, ids = await inference.validator.in_thread(read)
    if not ids:
        raise InvalidRequest("the chat template makes nothing of `messages`", "messages")
    return text, ids


async def tokenize_conversation(
    request: ChatRequest, inference: Inference, tooling: Tooling
) -> tuple[str, list[SimpleToken]]:
    use = tool_use(request)
    template = _template(inference)

    def read() -> tuple[str, list[SimpleToken]]:
        text = _render(request, template, tooling, use)
        encoding = inference.validator.encode(text, with_offsets=True, add_special_tokens=False)
        return text, token_offsets(encoding, text)

    return await inference.validator.in_thread(read)


def _template(inference: Inference) -> Template:
    if inference.chat_template is None:
        raise TemplateError("template not found: the model has none, give one with --tokenizer-config-path")
    return inference.chat_template


def _render(request: ChatRequest, template: Template, tooling: Tooling, use: ToolUse | None) -> str:
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
