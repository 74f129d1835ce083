"""Byte-level BPE: GPT-2's `vocab.json` with `merges.txt`, and tiktoken's files.

The vocabulary says nothing of how text is split into words first. That is known of each tokenizer class.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelOffsets
from tokenizers.processors import RobertaProcessing

from legato.common.errors import ModelFileError
from legato.modelfiles.gguf.splitting import splitting_of
from legato.modelfiles.vocabularies.special import TokenizerSettings

END = "<|endoftext|>"
# Of a tiktoken file that does not say otherwise: Llama 3's way to split.
TIKTOKEN_SPLITTING = "llama-bpe"

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]


def gpt2(files: tuple[Path, Path], settings: TokenizerSettings) -> Tokenizer:
    """GPT-2, OPT, GPT-Neo, GPT-J, CodeGen, Phi, DBRX and StarCoder 2."""
    tokenizer = _byte_level(files, settings)
    settings.add_to(tokenizer, {"bos": END, "eos": END, "unk": END})
    _frame_if_asked(tokenizer, settings, bos=END, eos=END)
    return tokenizer


def gpt_neox(files: tuple[Path, Path], settings: TokenizerSettings) -> Tokenizer:
    tokenizer = _byte_level(files, settings)
    tokenizer.normalizer = normalizers.NFC()
    settings.add_to(tokenizer, {"bos": END, "eos": END, "unk": END, "pad": "<|padding|>"})
    _frame_if_asked(tokenizer, settings, bos=END, eos=END)
    return tokenizer


def qwen2(files: tuple[Path, Path], settings: TokenizerSettings) -> Tokenizer:
    tokenizer = _byte_level(files, settings)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting_of("qwen2").pre_tokenizer
    settings.add_to(tokenizer, {"eos": END, "unk": END, "pad": END})
    _frame_if_asked(tokenizer, settings, bos=None, eos=END)
    return tokenizer


def roberta(files: tuple[Path, Path], settings: TokenizerSettings) -> Tokenizer:
    """BART's, too: texts stand between two tokens."""
    tokenizer = _byte_level(files, settings)
    roles = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
    settings.add_to(tokenizer, dict(roles))
    first, last = (settings.numbered(tokenizer, role, roles[role]) for role in ("cls", "sep"))
    tokenizer.post_processor = RobertaProcessing(
        last,
        first,
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space"),
    )
    return tokenizer


def tiktoken(file: Path, settings: TokenizerSettings, splitting: str = TIKTOKEN_SPLITTING) -> Tokenizer:
    """The vocabulary of a tiktoken file; tokens of added_tokens_decoder that lie behind it get their numbers."""
    ranks = _ranks(file)
    names = _byte_names()
    vocabulary = {"".join(names[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        ("".join(names[byte] for byte in left), "".join(names[byte] for byte in right))
        for token in sorted(ranks, key=ranks.__getitem__)
        for left, right in _splits(token, ranks)
    ]
    tokenizer = Tokenizer(BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = splitting_of(splitting).pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelOffsets(trim_offsets=False)
    numbers = range(len(ranks), max(settings.added, default=-1) + 1)
    known = {number: token.content for number, token in settings.added.items()}
    reserved = [known.get(number, f"<|reserved_token_{number}|>") for number in numbers]
    tokenizer.add_special_tokens(reserved)
    settings.add_to(tokenizer, {})
    _frame_if_asked(tokenizer, settings, bos=None, eos=None)
    return tokenizer


def _byte_level(files: tuple[Path, Path], settings: TokenizerSettings) -> Tokenizer:
    vocabulary, merges = _read(*files)
    tokenizer = Tokenizer(BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=settings.flag("add_prefix_space"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _frame_if_asked(tokenizer: Tokenizer, settings: TokenizerSettings, *, bos: str | None, eos: str | None) -> None:
    first = settings.role("bos", bos) if settings.flag("add_bos_token") else None
    last = settings.role("eos", eos) if settings.flag("add_eos_token") else None
    settings.frame(tokenizer, bos=first, eos=last)


def _read(vocab: Path, merges: Path) -> tuple[Vocabulary, Merges]:
    try:
        vocabulary = json.loads(vocab.read_bytes())
        lines = merges.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ModelFileError(f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelFileError(f"{vocab} or {merges.name} is malformed: {error}") from None
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise ModelFileError(f"{vocab} must map tokens to numbers")
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines if line and not line.startswith("#version")]
    wrong = next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()), None)
    if wrong is not None:
        raise ModelFileError(f"{merges} has the line {' '.join(wrong)!r}; expected two tokens that make a third one")
    return vocabulary, pairs  # type: ignore[return-value]


def _ranks(file: Path) -> dict[bytes, int]:
    """Lines of a token in base64 and its number."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        if not pairs:
            raise ValueError("no tokens")
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, binascii.Error):
        raise ModelFileError(f"{file} is neither a SentencePiece nor a tiktoken file; download it again") from None


def _splits(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens that make up this one, the lowest numbers first."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    found = [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _byte_names() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies: themselves where they are visible, and
    the next free ones from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
