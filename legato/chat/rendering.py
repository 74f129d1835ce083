"""Renders messages to a prompt, byte for byte like transformers' `apply_chat_template`.

Runs inside a template process (`worker.py`), because what a template does may take forever or all the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes

from legato.chat.content import ArgumentsForm, ContentForms, Message, arguments_form
from legato.chat.environment import ChatEnvironment

# Marks where the last message ends. The space at its end shows whether the template trims what it prints.
END_MARK = "LEGATO_CONTINUES_HERE "
# Names under which clients and templates know what a model thought before it spoke, the common one first.
REASONING = ("reasoning_content", "thinking", "reasoning")
# What a request says elsewhere or not at all. `chat_template_kwargs` adds variables; it replaces nothing.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}


class BadConversation(Exception):
    """The request is malformed, or this template cannot render it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What to render. The messages are changed on the way."""

    messages: list[Any]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not self.messages:
            raise BadConversation("there are no messages")
        for name, things in (("messages", self.messages), ("tools", self.tools), ("documents", self.documents)):
            if things is not None and not all(isinstance(thing, dict) for thing in things):
                raise BadConversation(f"`{name}` must be a list of objects")
        if self.continue_final_message and self.add_generation_prompt:
            raise BadConversation("`continue_final_message` and `add_generation_prompt` are mutually exclusive")


class RenderTemplate:
    """One compiled template. One that cannot be compiled says so whenever it is used."""

    def __init__(
        self, environment: ChatEnvironment, source: str, constants: dict[str, Any], output_limit: int, for_tools: bool
    ) -> None:
        self.source = source
        self.mentions_tools = False
        self._constants = constants
        self._output_limit = output_limit
        self._compiled: jinja2.Template | Exception
        try:
            names = environment.parse(source).find_all(nodes.Name)
            self.mentions_tools = any(name.name == "tools" for name in names)
            self._compiled = environment.from_string(source)
        except Exception as error:  # what is too much for Python's parser comes as all kinds of exceptions
            self._compiled = error
        probe = partial(self._run, tools=[] if for_tools else None, documents=None, add_generation_prompt=True)
        self.tool_arguments: ArgumentsForm = arguments_form(probe)
        self._forms = ContentForms(probe)

    def render(self, conversation: Conversation) -> str:
        messages = [_with_reasoning(self._forms.fit(message)) for message in conversation.messages]
        last_text = self._mark_end(messages) if conversation.continue_final_message else None
        prompt = self._run(
            messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            **conversation.kwargs,
        )
        return prompt if last_text is None else _cut_at_mark(prompt, last_text)

    def _mark_end(self, messages: list[Message]) -> str:
        """Puts the mark behind the text of the last message, and returns that text."""
        message = messages[-1]
        content = message.get("content")
        if "content" not in self.source:
            raise BadConversation("`continue_final_message` does not work with this chat template")
        if isinstance(content, list):
            message = next((part for part in reversed(content) if isinstance(part, dict) and "text" in part), {})
        field = "text" if isinstance(content, list) else "content"
        text = message.get(field)
        if not isinstance(text, str):
            raise BadConversation("`continue_final_message` needs a last message with text")
        message[field] = text + END_MARK
        return text

    def _run(self, messages: list[Message], /, **variables: Any) -> str:
        if isinstance(self._compiled, Exception):
            raise self._compiled
        chunks, length = [], 0
        for chunk in self._compiled.generate({**self._constants, "messages": messages, **variables}):
            length += len(chunk)
            if length > self._output_limit:
                raise BadConversation(f"the prompt has more than {self._output_limit} characters")
            chunks.append(chunk)
        return "".join(chunks)


def _with_reasoning(message: Message) -> Message:
    """Under whatever name the client sent it, where templates look for it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _cut_at_mark(prompt: str, last_text: str) -> str:
    mark = END_MARK.strip()
    if last_text.strip() not in prompt or mark not in prompt:
        raise BadConversation("the chat template does not render the last message unchanged, so it cannot be continued")
    end = prompt.rindex(mark)
    untrimmed = prompt.startswith(END_MARK, end)
    return prompt[:end] if untrimmed else prompt[:end].rstrip()


class Renderer:
    """The templates of one model, by name."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str], output_limit: int) -> None:
        environment = ChatEnvironment()
        self._reserved = RESERVED | environment.globals.keys()
        self._templates = {
            name: RenderTemplate(environment, source, dict(special_tokens), output_limit, for_tools=name == "tool_use")
            for name, source in templates.items()
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What must be known about the template for tools before messages are prepared for it."""
        try:
            template = self._choose(with_tools=True)
        except BadConversation:
            return {}
        return {"mentions_tools": template.mentions_tools, "tool_arguments": template.tool_arguments}

    def render(self, conversation: Conversation) -> str:
        conversation.check()
        if taken := sorted(self._reserved & conversation.kwargs.keys()):
            raise BadConversation(f"`chat_template_kwargs` cannot set `{taken[0]}`")
        return self._choose(conversation.tools is not None).render(conversation)

    def _choose(self, with_tools: bool) -> RenderTemplate:
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        raise BadConversation(f"the model has no default chat template, only {', '.join(sorted(self._templates))}")
