"""Token ids to text, one token at a time.

A token is not a piece of text: it may hold half a character, or a space that exists only after another token. What a
detokenizer hands out is final, so it waits for the rest of a character and never shows U+FFFD in its place. The pieces
and the flush, joined, are what the tokenizer decodes from the whole sequence. (But for one case: where a run of byte
tokens is broken, SentencePiece's fallback gives up the whole characters of that run too. They were shown by then.)

Two ways to get there. Byte-level vocabularies (Llama 3, Qwen, SmolLM, GPT-2 ...) give every token fixed bytes, so a
table and the state of a UTF-8 decoder are enough. For all others (SentencePiece and its byte tokens) the tokenizer
decodes a short window of tokens again and the difference is the piece.

Special tokens say nothing: they have a name to show (`Vocabulary.special`), and leave the text around them alone.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

REPLACEMENT = "\ufffd"
# A character has at most four bytes: four byte tokens in a row that are still not one never will be.
_MAX_BROKEN = 4
# Prompt tokens to decode along with the first generated ones. As many as TGI takes.
_CONTEXT = 5


class TokenDecoder(Protocol):
    """What a window needs of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer(Protocol):
    """The text of one sequence, as it grows."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that never became whole."""
        ...


class Vocabulary:
    """What the tokens of one tokenizer say. Built once per program, in a quarter of a second for 128,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: TokenDecoder = tokenizer
        # Names of the tokens that are no text, by id.
        self.special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._bytes = _ByteTable(tokenizer, self.special) if isinstance(tokenizer.decoder, ByteLevel) else None

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """For the tokens that follow `context`. Byte-level text does not depend on it."""
        if self._bytes is not None:
            return _ByteDetokenizer(self._bytes)
        return _WindowDetokenizer(self._tokenizer, self.special, context)

    def text(self, token_id: int) -> str:
        """One token on its own: its name if it is special, U+FFFD where it holds part of a character."""
        name = self.special.get(token_id)
        if name is not None:
            return name
        if self._bytes is not None:
            return self._bytes[token_id].decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class _ByteTable:
    """The bytes of every token: as text where they are whole characters, which is nearly always."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[int, str]) -> None:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # None: look in `fragments`. Ids that no token has, and special ones, are empty.
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
            except IndexError:  # models may have more rows than their tokenizer has tokens
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
    """Decodes the tokens since the last piece, with those of the last piece before them:

        ids    ├─── shown ───┼── waiting ──┤
        text   ├── _shown ───┼─── piece ───┤

    The shown tokens give the first waiting one its surroundings (a leading space is a space only after something).
    """

    def __init__(self, tokenizer: TokenDecoder, special: Mapping[int, str], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids = [token_id for token_id in context[-_CONTEXT:] if token_id not in special]
        self._num_shown = len(self._ids)
        self._shown = self._decode(self._ids)
        self._num_broken = 0

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            self._num_broken = 0
            return self._show(text[len(self._shown) :])
        self._num_broken += 1
        return self.flush() if self._num_broken == _MAX_BROKEN else ""

    def flush(self) -> str:
        self._num_broken = 0
        # On their own: byte fallback would otherwise take back the whole characters that were shown before them.
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
    """Byte-level vocabularies write bytes as visible characters: printable Latin-1 stands for itself, every other
    byte for a character from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token with any character outside the alphabet was added by hand and stands for its own text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
