"""The chat template of the model: messages in, prompt out.

template.py     this file: what the router uses
sources.py      which file the template comes from
  ── ipc/confined.py ──
worker.py       a process that renders, with limits
rendering.py    what transformers' `apply_chat_template` does
content.py      strings or lists of parts, as the template likes
environment.py  Jinja's sandbox and what transformers adds to it
"""

from __future__ import annotations

import logging
import marshal
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from legato.api.errors import RequestError
from legato.chat import RenderedKind
from legato.chat.sources import ChatTemplates, find_templates
from legato.ipc.confined import ConfinedPool, Confinement, ProcessEnded
from legato.modelfiles.files import ModelFiles

logger = logging.getLogger(__name__)

# Seconds after which a process that neither answers nor ends is given up.
_PATIENCE: Final = 10.0
# Not imported here: nothing of Jinja runs in this process.
_WORKER: Final = "legato.chat.worker"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    # Of processor time.
    seconds: float = 0.8
    # Characters of the prompt.
    output: int = 4_000_000
    # Bytes, the interpreter's own included.
    memory: int = 256 << 20

    @classmethod
    def for_payload(cls, num_bytes: int) -> RenderLimits:
        """Enough for any conversation of that many bytes, which Python may keep in thirty times as many."""
        return cls(output=2 * num_bytes, memory=max(cls().memory, 100 * num_bytes))


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a process found out about its templates."""

    mentions_tools: bool = False
    tool_arguments: Literal["object", "string"] = "object"


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
        self._limits = RenderLimits() if limits is None else limits
        setup = {"templates": templates.templates, "special_tokens": templates.special_tokens, **asdict(self._limits)}
        confinement = Confinement(_WORKER, self._limits.seconds, _PATIENCE, max_answer=4 * self._limits.output)
        self._processes = ConfinedPool(confinement, lambda: marshal.dumps(setup))
        try:
            facts = msgspec.json.decode(self._processes.start()[1], type=TemplateFacts)
        except ProcessEnded:
            facts = TemplateFacts()  # a request that renders with it is told why
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
            # Version 2 writes an object as often as it occurs. Later ones refer back, and a change to one message in
            # the process would be a change to its double.
            kind, body = self._processes.ask(marshal.dumps(conversation, 2))
        except ProcessEnded as error:
            raise TemplateError(self._reason(error)) from None
        except ValueError as error:  # nested too deeply to be sent
            raise TemplateError(str(error)) from None
        if kind == RenderedKind.PROMPT:
            return body.decode(errors="surrogatepass")
        problem = body.decode(errors="replace")
        raise MissingTemplateVariable(problem) if kind == RenderedKind.MISSING_VARIABLE else TemplateError(problem)

    def _reason(self, error: ProcessEnded) -> str:
        if error.exit_code == -signal.SIGPROF:
            return f"the chat template takes more than {self._limits.seconds:g} s"
        logger.warning("A template process ended", extra={"fields": {"cause": str(error)}})
        return "the chat template crashed the process that renders it"

    def close(self) -> None:
        self._processes.close()
