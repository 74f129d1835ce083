"""The reasoning formats of model families.

tag pairs         <think>…</think>                          Qwen3, SmolLM3, GLM; others with other words
no opening tag    …</think>                                 DeepSeek-R1: the template wrote the tag, or nobody did
phrases           Here is my thought process: … Here is my response: …                              Granite 3.2
channels          <|channel|>analysis<|message|>…<|end|>…<|channel|>final<|message|>…               gpt-oss
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Phase(Enum):
    """Where in an answer a text is."""

    BEFORE = "before"  # reasoning may follow, or the answer
    INSIDE = "inside"
    AFTER = "after"  # the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    # What reasoning begins and ends with; the first of each is what the model is made to say.
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    # The text begins inside, also where nobody wrote an opening.
    implied: bool = False
    # Messages with a header that names their channel. Reasoning has one, calls have one, and so has the answer.
    channels: bool = False
    # What a budget that is spent makes the model say.
    forced: str = ""

    @property
    def forced_end(self) -> str:
        return self.forced or self.closings[0]

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a token with a name but without a text."""
        return (*self.openings, *self.closings, *(HARMONY_TOKENS if self.channels else ()))

    def phase_after(self, prompt: str, continued: str = "") -> Phase:
        """Where an answer to the prompt begins. `continued` is the beginning of the answer that the prompt ends with,
        if it has one; else only what ends the prompt was written for the answer."""
        start = Phase.INSIDE if self.implied else Phase.BEFORE
        if continued:
            opened, closed = _last(continued, self.openings), _last(continued, self.closings)
            if opened == closed:  # has neither
                return Phase.AFTER if start is Phase.BEFORE else start
            return Phase.INSIDE if opened > closed else Phase.AFTER
        written = prompt.rstrip()
        if written.endswith(self.closings):
            return Phase.AFTER
        return Phase.INSIDE if written.endswith(self.openings) else start


def _last(text: str, markers: tuple[str, ...]) -> int:
    return max(text.rfind(marker) for marker in markers)


HARMONY_TOKENS: Final = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip

THINK: Final = ReasoningFormat("qwen3", ("<think>",), ("</think>",))
DEEPSEEK_R1: Final = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), implied=True)
SEED: Final = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",))
MISTRAL: Final = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))
COMMAND_A: Final = ReasoningFormat("command_a", ("<|START_THINKING|>",), ("<|END_THINKING|>",))
KIMI_VL: Final = ReasoningFormat("kimi_vl", ("◁think▷",), ("◁/think▷",))
MEDGEMMA: Final = ReasoningFormat("medgemma", ("<unused94>thought",), ("<unused95>",))
GEMMA4: Final = ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",))
GRANITE: Final = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
HARMONY: Final = ReasoningFormat(
    "gpt_oss",
    ("<|channel|>analysis<|message|>",),
    ("<|channel|>final<|message|>",),
    implied=True,
    channels=True,
    forced="<|end|><|start|>assistant<|channel|>final<|message|>",
)

# In the order in which templates are searched for their markers: the closing, which templates cut answers at.
_BY_MARKER: Final = (HARMONY, SEED, MISTRAL, COMMAND_A, KIMI_VL, MEDGEMMA, GEMMA4, GRANITE)
REASONING_FORMATS: Final = {
    format.name: format
    for format in (THINK, DEEPSEEK_R1, SEED, MISTRAL, COMMAND_A, KIMI_VL, MEDGEMMA, GEMMA4, GRANITE, HARMONY)
}


def reasoning_format_of(template: str, wanted: str = "auto") -> ReasoningFormat | None:
    """By name, or the one that a chat template speaks of. None: the model does not reason."""
    if wanted != "auto":
        return REASONING_FORMATS.get(wanted)
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    for format in _BY_MARKER:
        if any(marker.strip(":") in template for marker in format.closings):
            return format
    if THINK.closings[0] not in template:
        return None
    return THINK if THINK.openings[0] in template else DEEPSEEK_R1
