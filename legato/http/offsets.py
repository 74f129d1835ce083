"""Where tokens are in a text, counted in bytes of its UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tokenizers import Encoding

from legato.api.native import SimpleToken


def token_offsets(encoding: Encoding, text: str) -> list[SimpleToken]:
    """Tokens that share a character each say the whole of it; special tokens that were added say nothing."""
    byte_at: Sequence[int]
    if text.isascii():
        byte_at = range(len(text) + 1)
    else:
        byte_at = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        SimpleToken(id=token_id, text=text[start:stop], start=byte_at[start], stop=byte_at[stop])
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
