"""The tool call formats of model families.

hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>        Hermes, Qwen, SmolLM3
llama3    <|python_tag|>{"name": "f", "parameters": {...}}                    Llama 3.x, mostly without the tag
mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}]                     Mistral; lately [TOOL_CALLS]f[ARGS]{...}
harmony   <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>                 gpt-oss
json      {"name": "f", "parameters": {...}}                                  whatever was asked for JSON in its prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    # What a call, or a list of them, may begin with anywhere in the text.
    openings: tuple[str, ...] = ()
    # Whether a text that begins with a brace (or bracket) is a call (or a list of them).
    bare: bool = False
    # What stands after a call and is no part of it.
    closings: tuple[str, ...] = ()
    # Between the name and the arguments, where a call is not one JSON object.
    after_name: str | None = None
    # The word for the arguments.
    arguments: str = "arguments"
    # Whether models that must call a tool may call several, where the request does not say.
    several: bool = False
    # The chat template insists on ids of so many letters and digits.
    id_len: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a token with a name but without a text."""
        named = () if self.after_name is None else (self.after_name,)
        return (*self.openings, *self.closings, *named)


HERMES: Final = Dialect("hermes", openings=("<tool_call>",), closings=("</tool_call>",), several=True)
LLAMA3: Final = Dialect("llama3", openings=("<|python_tag|>",), bare=True, closings=(";",), arguments="parameters")
MISTRAL: Final = Dialect(
    "mistral", openings=("[TOOL_CALLS]",), closings=(",", "]"), after_name="[ARGS]", several=True, id_len=9
)
JSON: Final = Dialect("json", bare=True, closings=(",", "]"), arguments="parameters")
# Calls are messages here: `chat/reasoning/harmony.py` reads them.
HARMONY: Final = Dialect("harmony")
# Models of every family like to put JSON into a block of code.
FENCE, END_OF_FENCE = "```json", "```"

DIALECTS: Final = {dialect.name: dialect for dialect in (HERMES, LLAMA3, MISTRAL, HARMONY, JSON)}


def dialect_of(template: str, wanted: str = "auto") -> Dialect:
    """By name, or the one that a chat template speaks."""
    if wanted in DIALECTS:
        return DIALECTS[wanted]
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    for dialect in (HERMES, MISTRAL, LLAMA3):
        if any(opening in template for opening in dialect.openings):
            return dialect
    # The templates of Llama 3.2 describe calls without ever naming the tag.
    return LLAMA3 if "<|start_header_id|>" in template and '"parameters"' in template else JSON
