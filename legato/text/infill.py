"""Prompts for filling in the middle: the text before and behind a gap, between the tokens that a code model was trained
with."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens before the prefix, before the suffix, and before what the model is to write."""

    prefix: str
    suffix: str
    middle: str

    @staticmethod
    def of(tokenizer: Tokenizer) -> InfillFormat | None:
        """The format whose tokens the vocabulary has, or None."""
        return next((known for known in KNOWN if known.is_of(tokenizer)), None)

    def is_of(self, tokenizer: Tokenizer) -> bool:
        return all(tokenizer.token_to_id(token) is not None for token in (self.prefix, self.suffix, self.middle))

    def prompt(self, before: str, behind: str) -> str:
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}"


KNOWN = (
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
