"""The chat template of the model: messages in, prompt out.

chat_template.py     this file: what the router uses
chat_sources.py      which file the template comes from
chat_process.py      hands conversations to processes of our own, with limits
chat_frames.py       what is said between the router and these processes
  ── socket pair ──
chat_worker.py       one such process
chat_rendering.py    what transformers' `apply_chat_template` does
chat_content.py      strings or lists of parts, as the template likes
chat_environment.py  Jinja's sandbox and what transformers adds to it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from legato.api.errors import RequestError
from legato.chat.frames import Kind
from legato.chat.process import Facts, ProcessEnded, RenderLimits, TemplateProcesses
from legato.chat.sources import ChatTemplates, find_templates
from legato.modelfiles.files import ModelFiles


class TemplateFailed(RequestError):
    """Whatever goes wrong with a template is counted together, as TGI does."""

    @property
    def counted_as(self) -> str:
        return "template"


class TemplateError(TemplateFailed):
    """The template refuses the messages, is broken, or takes too much time or memory."""

    status, error_type = 422, "template_error"

    def __init__(self, problem: str) -> None:
        super().__init__(f"Template error: {problem}")


class MissingTemplateVariable(TemplateFailed):
    """The template uses something that the request does not give."""

    status, error_type = 422, "missing_template_variable"

    def __init__(self, problem: str) -> None:
        super().__init__(f"Missing template variable: {problem}")


class ChatTemplate:
    """Blocking, and safe to use from several threads."""

    def __init__(self, templates: ChatTemplates, limits: RenderLimits | None = None) -> None:
        # The file that it comes from.
        self.source = templates.source
        # The template for tools, where there is one of its own.
        self.text = templates.templates.get("tool_use", templates.templates.get("default", ""))
        self._processes = TemplateProcesses(
            templates.templates, templates.special_tokens, RenderLimits() if limits is None else limits
        )
        try:
            facts = self._processes.start()
        except ProcessEnded:
            facts = Facts()  # whoever renders with it will be told why
        # Whether it has a place for tools.
        self.mentions_tools = facts.mentions_tools
        # How it wants the arguments of earlier calls, which OpenAI's clients send as a string.
        self.tool_arguments = facts.tool_arguments

    @staticmethod
    def load(
        files: ModelFiles, tokenizer_config_path: Path | None = None, payload_limit: int = 2_000_000
    ) -> ChatTemplate | None:
        """The template of a model, or None where it has none. Takes a tenth of a second."""
        templates = find_templates(files, tokenizer_config_path)
        return None if templates is None else ChatTemplate(templates, RenderLimits.for_payload(payload_limit))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Plain data only: what comes out of JSON. `tools=[]` are tools, as for transformers; None are none."""
        conversation = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "kwargs": {} if kwargs is None else kwargs,
        }
        try:
            kind, body = self._processes.render(conversation)
        except ProcessEnded as error:
            raise TemplateError(str(error)) from None
        except ValueError as error:  # nested too deeply to be sent
            raise TemplateError(str(error)) from None
        if kind is Kind.TEXT:
            return body.decode(errors="surrogatepass")
        problem = body.decode(errors="replace")
        raise MissingTemplateVariable(problem) if kind is Kind.MISSING else TemplateError(problem)

    def close(self) -> None:
        self._processes.close()
