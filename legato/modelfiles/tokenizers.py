"""Loading of tokenizers, independent of the model's format."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from legato.common.errors import ModelFileError


def load_tokenizer(file: Path) -> Tokenizer:
    """From a `tokenizer.json`."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(f"{file} cannot be read: {error}; download it again") from None


def set_special_tokens(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Add `bos` before and `eos` after each encoded text. Replaces the tokenizer's post-processor."""
    before, after = ([token] if token else [] for token in (bos, eos))
    first = [*before, "$A", *after]
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    tokenizer.post_processor = TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
    )
