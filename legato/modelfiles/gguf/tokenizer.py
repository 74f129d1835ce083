"""A tokenizer from the metadata of a GGUF file.

Two types cover the decoder models. "gpt2" is byte-level BPE: the file has the merges and the name of a pre-tokenizer
(`splitting.py`). "llama" is SentencePiece BPE: the file has a score for every token, and the pair with the best-scoring
result is merged first; `merges_from_scores` turns the scores into an equivalent list of merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.gguf.file import GgufFile
from legato.modelfiles.gguf.splitting import splitting_of
from legato.modelfiles.tokenizers import merges_from_scores, set_special_tokens
from legato.modelfiles.vocabularies.sentencepiece import TokenType

SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokenizer metadata of a file. Lists have one entry per token id."""

    source: str
    kind: str
    splitting: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    metadata: dict[str, Any]

    @classmethod
    def of(cls, gguf: GgufFile) -> GgufVocabulary:
        metadata = gguf.metadata
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise ModelFileError(f"{gguf.path} has no vocabulary (tokenizer.ggml.tokens); use a complete model file")
        vocabulary = cls(
            source=str(gguf.path),
            kind=str(metadata.get("tokenizer.ggml.model")),
            splitting=str(metadata.get("tokenizer.ggml.pre", "default")),
            tokens=tokens,
            types=metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens),
            scores=metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens),
            merges=metadata.get("tokenizer.ggml.merges") or [],
            metadata=metadata,
        )
        for name, values in (("token_type", vocabulary.types), ("scores", vocabulary.scores)):
            if not isinstance(values, list) or len(values) != len(tokens):
                raise ModelFileError(f"{gguf.path}: tokenizer.ggml.{name} does not have one entry per token")
        return vocabulary

    def special_id(self, role: str) -> int | None:
        """`tokenizer.ggml.<role>_token_id`, for the roles bos, eos, unknown, padding, eot and eom."""
        token_id = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is None or (isinstance(token_id, int) and 0 <= token_id < len(self.tokens)):
            return token_id
        raise ModelFileError(
            f"{self.source}: tokenizer.ggml.{role}_token_id is {token_id!r}, not one of {len(self.tokens)} tokens"
        )

    def special(self, role: str) -> str | None:
        token_id = self.special_id(role)
        return None if token_id is None else self.tokens[token_id]

    @property
    def add_bos(self) -> bool:
        """Whether texts begin with bos; by default as usual for the family."""
        family = self.kind == "llama" or (self.kind == "gpt2" and splitting_of(self.splitting).add_bos)
        return self.flag("add_bos_token", family) and self.special("bos") is not None

    @property
    def add_eos(self) -> bool:
        return self.flag("add_eos_token", False) and self.special("eos") is not None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def ids(self) -> dict[str, int]:
        """Token -> id; the first one if a token occurs twice."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            ids.setdefault(token, token_id)
        return ids


def tokenizer_from_gguf(gguf: GgufFile) -> Tokenizer:
    vocabulary = GgufVocabulary.of(gguf)
    build = _BUILDERS.get(vocabulary.kind)
    if build is None:
        raise UnsupportedModel(
            f"{gguf.path}: the GGUF tokenizer '{vocabulary.kind}' is not supported; Legato reads {', '.join(_BUILDERS)}"
        )
    try:
        tokenizer = build(vocabulary)
        _add_whole_tokens(tokenizer, vocabulary)
        bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
        set_special_tokens(tokenizer, bos if vocabulary.add_bos else None, eos if vocabulary.add_eos else None)
    except (ModelFileError, UnsupportedModel):
        raise
    except Exception as error:
        # The library raises bare exceptions.
        raise ModelFileError(f"{gguf.path}: invalid tokenizer metadata: {error}") from None
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    splitting = splitting_of(vocabulary.splitting)
    ids = vocabulary.ids()
    merges = [_halves(merge, ids) for merge in vocabulary.merges]
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=splitting.ignore_merges))
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _halves(merge: str, ids: dict[str, int]) -> tuple[str, str]:
    """A merge is two tokens separated by a space."""
    left, _, right = merge.partition(" ")
    if left in ids and right in ids and left + right in ids:
        return left, right
    raise ValueError(f"the merge '{merge}' contains tokens that are not in the vocabulary")


def _sentence_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    ids = vocabulary.ids()
    unknown = vocabulary.special("unknown") or next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.UNKNOWN),
        None,
    )
    merges = _merges(vocabulary, ids)
    tokenizer = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    text: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def _merges(vocabulary: GgufVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    return merges_from_scores(
        {
            token: vocabulary.scores[token_id]
            for token, token_id in ids.items()
            if vocabulary.types[token_id] == TokenType.NORMAL
        }
    )


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Tokens that are matched before pre-tokenization: control (skipped in output) and user-defined (shown)."""
    special, plain = [], []
    strips = _tokens_that_strip_whitespace(vocabulary)
    # Some converters do not mark these as control tokens.
    ends = {vocabulary.special_id(role) for role in ("eos", "eot", "eom")}
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in ends:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=token in strips))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _tokens_that_strip_whitespace(vocabulary: GgufVocabulary) -> set[str]:
    """Phi-3's control tokens strip the whitespace after them, which GGUF cannot express."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return set()
    return set(vocabulary.tokens) - {"<unk>", "<s>", "<|endoftext|>"}


_BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece}
