"""Loading of tokenizers, independent of the model's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from legato.common.errors import ModelFileError

# Longer than any trained token. Limits the time for hostile files, since every split of a token is tried.
MAX_MERGED_CHARACTERS = 256


def load_tokenizer(file: Path) -> Tokenizer:
    """From a `tokenizer.json`."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(f"{file} cannot be read: {error}; download it again") from None


class _AddedToken(Struct):
    id: int
    content: str


class _AddedTokens(Struct):
    """The part of a `tokenizer.json` that is not its vocabulary."""

    added_tokens: list[_AddedToken] = []


def token_number(folder: Path, config: Mapping[str, Any], text: str) -> int | None:
    """The id of an added token, from the files alone: to build a tokenizer takes a tenth of a second and more. `config`
    is tokenizer_config.json. None where no file has the token, or a file is malformed, of which its reader tells."""
    try:
        decoder = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, dict[str, Any]], strict=False)
        for number, token in decoder.items():
            if token.get("content") == text:
                return number
        file = folder / "tokenizer.json"
        if file.exists():
            added = msgspec.json.decode(file.read_bytes(), type=_AddedTokens).added_tokens
            return next((token.id for token in added if token.content == text), None)
        for name in ("added_tokens.json", "vocab.json"):
            if (folder / name).exists():
                found = msgspec.json.decode((folder / name).read_bytes(), type=dict[str, int]).get(text)
                if found is not None:
                    return found
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError):
        pass
    return None


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


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: all pairs of tokens that make a third, by descending score of the third.

    `scores` has normal tokens only: control tokens never match text, and user-defined ones are matched before.
    SentencePiece takes the leftmost of equal pairs; among pairs with the same result that matters only in runs of one
    letter, where the pair with the longer left half is leftmost. Hence it comes first.
    """
    short = [token for token in scores if len(token) <= MAX_MERGED_CHARACTERS]
    return [
        (token[:cut], token[cut:])
        for token in sorted(short, key=lambda token: -scores[token])
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]
