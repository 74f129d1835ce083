"""What a tokenizer puts around every text it encodes."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


def set_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """`bos` before and `eos` after each text; None for nothing. Replaces what the tokenizer did before."""
    before, after = ([token] if token else [] for token in (bos, eos))
    first = [*before, "$A", *after]
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    tokenizer.post_processor = TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
    )
