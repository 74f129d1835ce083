"""One way to a tokenizer, whatever the model's format."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from legato.common.errors import ModelFileError
from legato.modelfiles.gguf.file import GgufFile
from legato.modelfiles.gguf.tokenizer import tokenizer_from_gguf


def load_tokenizer(source: Path | GgufFile) -> Tokenizer:
    """From a `tokenizer.json`, or from the vocabulary that a GGUF file carries."""
    if isinstance(source, GgufFile):
        return tokenizer_from_gguf(source)
    try:
        return Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare exceptions for everything from bad JSON to unknown parts
        raise ModelFileError(f"{source} is not a tokenizer that can be read: {error}; download it again") from None
