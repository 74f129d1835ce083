"""The output format of the model: reasoning, text and tool calls. Determined once and used by every chat.

text of the tokens ──► TagParser ──content──► CallParser ──► Thought, Content, CallBegins, CallGoesOn
                  └──► HarmonyParser, which does both ───►
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from legato.chat.reasoning import formats
from legato.chat.reasoning.formats import Phase, ReasoningFormat, reasoning_format_of
from legato.chat.reasoning.harmony import HarmonyParser
from legato.chat.reasoning.tagged import TagParser
from legato.chat.tools.dialects import HARMONY
from legato.chat.tools.parser import CallGoesOn, CallParser, Content, Event, Thought
from legato.chat.tools.requests import ToolUse
from legato.chat.tools.tooling import ChatRenderer, Tooling

# What templates call the switch for reasoning.
_SWITCHES: Final = ("enable_thinking", "thinking")
# The variable of templates that know efforts themselves.
_EFFORT: Final = "reasoning_effort"
# Tokens of reasoning that an effort stands for where the template does not know efforts. The others are not limited.
EFFORT_BUDGETS: Final = {"minimal": 512, "low": 2048, "medium": 8192}


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """What a request says about reasoning."""

    # None: as the model is used to.
    enabled: bool | None = None
    effort: str | None = None
    # The most tokens.
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tooling: Tooling
    # None: the model does not reason, or nobody wants to know.
    reasoning: ReasoningFormat | None
    # Markers of reasoning that are tokens of their own.
    tokens: dict[str, int]
    # Whether the template does something about efforts.
    knows_efforts: bool

    @staticmethod
    def of(
        tokenizer: Tokenizer, template: ChatRenderer | None, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> ChatFormat:
        text = "" if template is None else template.text
        tooling = Tooling.of(tokenizer, template, tool_parser)
        # Where calls are channels, so is the answer: there is no reading it without them.
        wanted = formats.HARMONY.name if tooling.dialect is HARMONY else reasoning_parser
        reasoning = reasoning_format_of(text, wanted)
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        markers = () if reasoning is None else reasoning.markers
        return ChatFormat(
            tooling,
            reasoning,
            {marker: token_id for marker in markers for name, token_id in added.items() if marker.startswith(name)},
            _EFFORT in text,
        )

    def spoken(self, use: ToolUse | None) -> frozenset[int]:
        """Tokens that a parser must see."""
        called = frozenset() if use is None else self.tooling.spoken
        return called.union(self.tokens.values())

    def parser(self, use: ToolUse | None, phase: Phase) -> AnswerParser | None:
        """For one answer. None: all of it is content."""
        if self.reasoning is not None and self.reasoning.channels:
            names = frozenset[str]() if use is None else use.names
            several = use is None or use.several is not False
            return AnswerParser(HarmonyParser(names, phase=phase, several=several), None)
        calls = None if use is None else self.tooling.parser(use)
        tags = None if self.reasoning is None else TagParser(self.reasoning, phase)
        return None if calls is None and tags is None else AnswerParser(tags, calls)

    def describes_reasoning(self, use: ToolUse | None) -> bool:
        """Whether the grammar of calls that must be made covers the reasoning before them."""
        return use is not None and bool(use.forced) and self.tooling.dialect is HARMONY

    def variables(self, wish: ReasoningWish) -> dict[str, Any]:
        """For the chat template."""
        enabled = wish.enabled
        if wish.effort is not None and enabled is None:
            enabled = wish.effort != "none"
        variables: dict[str, Any] = {} if enabled is None else dict.fromkeys(_SWITCHES, enabled)
        if wish.effort is not None and wish.effort != "none":
            variables[_EFFORT] = wish.effort
        return variables

    def budget(self, wish: ReasoningWish) -> int | None:
        if wish.budget is not None or wish.effort is None or self.knows_efforts:
            return wish.budget
        return EFFORT_BUDGETS.get(wish.effort)


class AnswerParser:
    """Takes one answer apart while it is being written."""

    def __init__(self, reasoning: TagParser | HarmonyParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        # Tokens, those of the markers included.
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        if isinstance(self._reasoning, HarmonyParser):
            return self._reasoning.has_calls
        return self._calls is not None and self._calls.has_calls

    def feed(self, texts: Iterable[str]) -> list[Event]:
        """One text for each token."""
        if self._reasoning is None:
            text = "".join(texts)
            return self._calls.feed(text) if self._calls is not None else [Content(text)] if text else []
        events: list[Event] = []
        for text in texts:
            thought = self._reasoning.thinking
            events += self._reasoning.feed(text)
            self.num_reasoning_tokens += thought or self._reasoning.thinking
        return merged(self._with_calls(events))

    def finish(self) -> list[Event]:
        """The text has ended."""
        events = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return merged(events if self._calls is None else events + self._calls.finish())

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found


def merged(events: list[Event]) -> list[Event]:
    """Neighbours of a kind together: clients get an event for what one step brought."""
    together: list[Event] = []
    for event in events:
        last = together[-1] if together else None
        match last, event:
            case Content(before), Content(text):
                together[-1] = Content(before + text)
            case Thought(before), Thought(text):
                together[-1] = Thought(before + text)
            case CallGoesOn(index, before), CallGoesOn(number, more) if index == number:
                together[-1] = CallGoesOn(index, before + more)
            case _:
                together.append(event)
    return together
