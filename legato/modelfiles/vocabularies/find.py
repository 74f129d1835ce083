"""Chooses the files and the method to build a model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.vocabularies import byte_level, pieces
from legato.modelfiles.vocabularies.sentencepiece import SentencePieceModel, is_sentencepiece
from legato.modelfiles.vocabularies.special import TokenizerSettings

VOCAB, MERGES = "vocab.json", "merges.txt"
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# Every file that is looked for, for downloads.
FILES = (VOCAB, MERGES, *PIECES, "tiktoken.model", "*.tiktoken")

ByteLevelClass = Callable[[tuple[Path, Path], TokenizerSettings], Tokenizer]
PiecesClass = Callable[[SentencePieceModel, TokenizerSettings], Tokenizer]

BYTE_LEVEL: dict[str, ByteLevelClass] = {
    "GPT2Tokenizer": byte_level.gpt2,
    "CodeGenTokenizer": byte_level.gpt2,
    "GPTNeoXTokenizer": byte_level.gpt_neox,
    "Qwen2Tokenizer": byte_level.qwen2,
    "RobertaTokenizer": byte_level.roberta,
    "BartTokenizer": byte_level.roberta,
}
SENTENCEPIECE: dict[str, PiecesClass] = {
    "T5Tokenizer": pieces.t5,
    "PegasusTokenizer": pieces.pegasus,
    "LlamaTokenizer": pieces.llama,
    "CodeLlamaTokenizer": pieces.code_llama,
    "GemmaTokenizer": pieces.gemma,
    "BaichuanTokenizer": pieces.plain,
}
# Names that say nothing of how text is split.
NO_CLASS = ("", "PreTrainedTokenizer", "TokenizersBackend")
# Of a model whose files name no class.
BY_MODEL_TYPE = {
    "bart": "BartTokenizer",
    "mt5": "T5Tokenizer",
    "t5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "mamba": "GPTNeoXTokenizer",
    "mpt": "GPTNeoXTokenizer",
    "olmo": "GPTNeoXTokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "paligemma"), "GemmaTokenizer"),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"),
        "Qwen2Tokenizer",
    ),
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "idefics", "idefics2"), "LlamaTokenizer"),
}


def tokenizer_from_files(path: Path, config: dict[str, Any], settings: TokenizerSettings) -> Tokenizer:
    """`config` is config.json. Raises an error that names what is missing."""
    by_type = BY_MODEL_TYPE.get(str(config.get("model_type")), "")
    named = str(settings.config.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    name = by_type if named in NO_CLASS else named
    vocabulary = next((path / file for file in PIECES if (path / file).exists()), None)
    if vocabulary is not None and is_sentencepiece(vocabulary):
        build = SENTENCEPIECE.get(name) or (None if name else pieces.plain)
        if build is None:
            raise unsupported(path, name, SENTENCEPIECE)
        return _build(vocabulary, lambda: build(SentencePieceModel.read(vocabulary), settings))
    if (path / VOCAB).exists() and (path / MERGES).exists():
        of_merges = BYTE_LEVEL.get(name) or (None if name else byte_level.gpt2)
        if of_merges is None:
            raise unsupported(path, name, BYTE_LEVEL)
        return _build(path / VOCAB, lambda: of_merges((path / VOCAB, path / MERGES), settings))
    tiktoken = vocabulary or next(iter(sorted([*path.glob("tiktoken.model"), *path.glob("*.tiktoken")])), None)
    if tiktoken is not None:
        return _build(tiktoken, lambda: byte_level.tiktoken(tiktoken, settings))
    raise ModelFileError(
        f"{path / 'tokenizer.json'} is missing, and so are {VOCAB} with {MERGES}, {', '.join(PIECES[:2])} and tiktoken "
        "files; download the model again"
    )


def unsupported(path: Path, name: str, known: Iterable[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path} has no tokenizer.json, and its tokenizer class '{name}' is not converted from other files; known: "
        f"{', '.join(sorted(known))}. Convert it once with transformers: "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    )


def _build(file: Path, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Errors of the library, which raises bare exceptions, with the file that they are about."""
    try:
        return build()
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{file}: {error}") from None
    except ModelFileError:
        raise
    except Exception as error:
        raise ModelFileError(f"{file} cannot be converted to a tokenizer: {error}") from None
