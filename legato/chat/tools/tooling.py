"""The tool support of the model: determined once, used by every chat."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from legato.chat.reasoning.formats import HARMONY_TOKENS
from legato.chat.tools.dialects import HARMONY, Dialect, dialect_of
from legato.chat.tools.enforcement import call_grammar
from legato.chat.tools.history import ToolHistory
from legato.chat.tools.parser import CallParser
from legato.chat.tools.requests import Schema, ToolError, ToolUse
from legato.grammar.kinds import Grammar, GrammarKind


class ChatRenderer(Protocol):
    """A chat template. Blocks while it renders, so it is called in a thread; raises RequestErrors of its own."""

    @property
    def text(self) -> str:
        """As it is written, or the one for tools if there are several."""
        ...

    @property
    def mentions_tools(self) -> bool: ...

    @property
    def tool_arguments(self) -> Literal["object", "string"]:
        """How it wants those of earlier calls."""
        ...

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Tooling:
    dialect: Dialect
    history: ToolHistory
    # Markers that are tokens of their own, whether these have a text or not.
    tokens: dict[str, int]

    @staticmethod
    def of(tokenizer: Tokenizer, template: ChatRenderer | None, dialect: str = "auto") -> Tooling:
        found = dialect_of("" if template is None else template.text, dialect)
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        if template is None:
            history = ToolHistory(found, mentions_tools=False, arguments="object")
        else:
            history = ToolHistory(found, mentions_tools=template.mentions_tools, arguments=template.tool_arguments)
        markers = HARMONY_TOKENS if found is HARMONY else found.markers
        return Tooling(found, history, {marker: added[marker] for marker in markers if marker in added})

    @property
    def spoken(self) -> frozenset[int]:
        """Tokens that a parser must see."""
        return frozenset(self.tokens.values())

    def parser(self, use: ToolUse) -> CallParser:
        return CallParser(self.dialect, use.names, several=use.several is not False)

    def grammar(self, use: ToolUse, answer: Grammar | None, *, schema_lenient: bool) -> Grammar | None:
        """`answer` is what a text that is no call must look like. None: the model may say whatever it likes."""
        if not use.forced and answer is None:
            return None
        several = not use.named and (self.dialect.several if use.several is None else use.several)
        return call_grammar(
            self.dialect,
            use.forced or use.tools,
            self.tokens,
            several=several,
            schema_lenient=schema_lenient,
            answer=None if use.forced or answer is None else self._schema_of(answer),
        )

    def _schema_of(self, answer: Grammar) -> Schema:
        if answer.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            raise ToolError("Grammar and tools are mutually exclusive, unless the grammar is a JSON schema")
        if self.dialect is HARMONY:
            raise ToolError("Grammar and tools are mutually exclusive for this model")
        schema = json.loads(answer.value) if answer.kind is GrammarKind.JSON_SCHEMA else {"type": "object"}
        return schema if isinstance(schema, dict) else {} if schema else {"not": {}}
