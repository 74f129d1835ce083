"""Incremental detokenization.

A token may contain part of a character, or a space that exists only after another token. Returned text is final, so an
incomplete character is held back and never returned as U+FFFD. All pieces and the flush, concatenated, equal the
decoded sequence. (One exception: for an invalid run of byte tokens, SentencePiece's byte fallback replaces the valid
characters of that run too, which were already returned.)

In byte-level vocabularies (Llama 3, Qwen, SmolLM, GPT-2 ...) every token has fixed bytes, so a table and an incremental
UTF-8 decoder are enough. For all others (SentencePiece and its byte tokens) a short window of tokens is decoded again,
and the difference is the piece.

Special tokens have no text, only a name (`Vocabulary.special`).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

REPLACEMENT = "\ufffd"
# A character has at most four bytes: four invalid byte tokens in a row never become one.
_MAX_INVALID = 4
# Prompt tokens decoded along with the first generated ones, as in TGI.
_CONTEXT = 5


class TokenDecoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        ...

    def flush(self) -> str:
        """The rest at the end: nothing, or U+FFFD for an incomplete character."""
        ...


class Vocabulary:
    """The texts of a tokenizer's tokens. Built once per process, in 0.25 s for 128,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: TokenDecoder = tokenizer
        # Names of special tokens by id.
        self.special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes = _ByteTable(tokenizer, self.special) if isinstance(tokenizer.decoder, ByteLevel) else None

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """For the tokens after `context`, which does not matter for byte-level vocabularies."""
        if self._bytes is not None:
            return _ByteDetokenizer(self._bytes)
        return _WindowDetokenizer(self._tokenizer, self.special, context)

    def text(self, token_id: int) -> str:
        """A single token: its name if it is special, with U+FFFD for an incomplete character."""
        name = self.special.get(token_id)
        if name is not None:
            return name
        if self._bytes is not None:
            return self._bytes[token_id].decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class _ByteTable:
    """The bytes of every token, as text if they are complete characters, which is nearly always."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[int, str]) -> None:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # None: see `fragments`. Empty for unused ids and special tokens.
        self.texts: list[str | None] = [""] * size
        self.fragments: dict[int, bytes] = {}
        for token_id in range(size):
            token = tokenizer.id_to_token(token_id)
            if token is None or token_id in special:
                continue
            data = _token_bytes(token)
            try:
                self.texts[token_id] = data.decode()
            except UnicodeDecodeError:
                self.texts[token_id] = None
                self.fragments[token_id] = data

    def __getitem__(self, token_id: int) -> bytes:
        text = self.texts[token_id] if token_id < len(self.texts) else ""
        return self.fragments[token_id] if text is None else text.encode()


class _ByteDetokenizer:
    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._texts = table.texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        if not self._pending:
            try:
                text = self._texts[token_id]
            except IndexError:  # the embedding may have more rows than the tokenizer has tokens
                return ""
            if text is not None:
                return text
        text = self._utf8.decode(self._table[token_id])
        self._pending = self._utf8.getstate()[0] != b""
        return text

    def flush(self) -> str:
        self._pending = False
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes the tokens of the last piece and those after it:

        ids    ├─── shown ───┼── waiting ──┤
        text   ├── _shown ───┼─── piece ───┤

    The shown tokens are the context of the first waiting one: a leading space is dropped at the start of a text.
    """

    def __init__(self, tokenizer: TokenDecoder, special: Mapping[int, str], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids = [token_id for token_id in context[-_CONTEXT:] if token_id not in special]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids)
        self._num_invalid = 0

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            self._num_invalid = 0
            return self._show(text[len(self._shown) :])
        self._num_invalid += 1
        return self.flush() if self._num_invalid == _MAX_INVALID else ""

    def flush(self) -> str:
        self._num_invalid = 0
        # Without context: byte fallback would otherwise replace valid characters that were already returned.
        return self._show(self._decode(self._ids[self._num_shown :]))

    def _show(self, piece: str) -> str:
        if piece:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode(self._ids)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies: printable Latin-1 characters stand for themselves, all other bytes
    are mapped to characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """An added token may have characters outside the byte alphabet; it is plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
