"""Reads the files of SentencePiece (`tokenizer.model`, `spiece.model`): a protobuf message of pieces, of how they were
trained, and of how text is normalized before it is cut into pieces.

The few fields that matter are read from the wire format. Their numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from legato.common.errors import ModelFileError, UnsupportedModel

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Fields of ModelProto, and of the messages in it.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID, _UNK_PIECE = 3, 35, 40, 45
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_WHITESPACE = 2, 3, 4

Value = int | bytes


class TokenType(IntEnum):
    """SentencePiece's, which GGUF files have, too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    text: str
    score: float
    kind: TokenType


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[VocabularyPiece]
    is_unigram: bool  # or else BPE
    unk_id: int
    unk_piece: str
    byte_fallback: bool
    charsmap: bytes  # of the normalization, in SentencePiece's compiled form; empty: there is none
    add_dummy_prefix: bool  # a space before the text
    remove_extra_whitespaces: bool

    @classmethod
    def read(cls, file: Path) -> SentencePieceModel:
        try:
            model = _fields(file.read_bytes())
            pieces = [_piece(_fields(_bytes(each))) for each in model.get(_PIECES, [])]
            trainer, normalizer = (
                {number: values[-1] for number, values in _fields(_bytes(model[part][-1])).items()}
                if part in model
                else {}
                for part in (_TRAINER, _NORMALIZER)
            )
            kind = int(trainer.get(_MODEL_TYPE, 1))
            made = cls(
                pieces=pieces,
                is_unigram=kind == 1,
                unk_id=int(trainer.get(_UNK_ID, 0)),
                unk_piece=_bytes(trainer.get(_UNK_PIECE, b"<unk>")).decode(),
                byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
                charsmap=_bytes(normalizer.get(_CHARSMAP, b"")),
                add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
                remove_extra_whitespaces=bool(normalizer.get(_EXTRA_WHITESPACE, 1)),
            )
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, struct.error, IndexError, KeyError):
            raise ModelFileError(f"{file} is not a SentencePiece model; download it again") from None
        if kind not in (1, 2):
            raise UnsupportedModel(f"{file} was trained as words or characters; unigram and BPE models are supported")
        if not pieces or not 0 <= made.unk_id < len(pieces):
            raise ModelFileError(f"{file} is not a SentencePiece model: it has no pieces, or no unknown piece")
        return made


def is_sentencepiece(file: Path) -> bool:
    """Whether the file begins with a piece. Others of the same name have lines of text: tiktoken's."""
    with file.open("rb") as stream:
        return stream.read(1) == bytes([_PIECES << 3 | _BYTES])


def _piece(message: dict[int, list[Value]]) -> VocabularyPiece:
    (text,) = message[_TEXT][-1:]
    score = struct.unpack("<f", _bytes(message[_SCORE][-1]))[0] if _SCORE in message else 0.0
    return VocabularyPiece(_bytes(text).decode(), score, TokenType(int(message[_KIND][-1]) if _KIND in message else 1))


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value


def _fields(data: bytes) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for number, value in _wire(data):
        found.setdefault(number, []).append(value)
    return found


def _wire(data: bytes) -> Iterator[tuple[int, Value]]:
    """Field numbers and values: whole numbers as such, all others as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("truncated")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
