"""Single tokens as logprobs show them. A token may hold part of a character, which has bytes but no text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel

from legato.text.detokenize import REPLACEMENT, Vocabulary

# The same few tokens are likely again and again.
_REMEMBERED = 16384
# SentencePiece's tokens for single bytes.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# How SentencePiece writes a space.
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenName:
    # What the token says, `bytes:\xe2\x82` (OpenAI's way) where that is no text.
    text: str
    bytes: list[int]


class TokenNames:
    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._byte_level = isinstance(tokenizer.decoder, ByteLevelDecoder)
        self.of = lru_cache(_REMEMBERED)(self._look_up)

    def _look_up(self, token_id: int) -> TokenName:
        text = self._text(token_id)
        if REPLACEMENT not in text:
            return TokenName(text, list(text.encode()))
        data = self._bytes(token_id, text)
        try:
            return TokenName(data.decode(), list(data))
        except UnicodeDecodeError:
            return TokenName("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data))

    def _text(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id) or ""
        if _SPACE in token and not self._byte_level and token_id not in self._vocabulary.special:
            return token.replace(_SPACE, " ")  # decoded on its own, such a token would lose its space
        return self._vocabulary.text(token_id)

    def _bytes(self, token_id: int, text: str) -> bytes:
        token: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return bytes(_byte_alphabet().get(character, ord(character) & 0xFF) for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else text.encode()


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes, asked of the tokenizer: a text with all bytes below 0xe0 that text can
    have, and what becomes of it. All other bytes are written as the characters of the same number."""
    text = "".join(map(chr, range(0x800)))
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return dict(zip("".join(piece for piece, _ in pieces), text.encode(), strict=True))
