"""Pre-tokenizers of byte-level BPE models.

A GGUF file contains only the name of its pre-tokenizer (`tokenizer.ggml.pre`). The table at the end has the
definitions, taken from the published tokenizers of the models. Merges never cross a boundary, so a wrong definition
would give other tokens without an error: an unknown name is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

from legato.common.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Splitting:
    pre_tokenizer: PreTokenizer
    # Normalize to NFC.
    compose: bool = False
    # A word that is in the vocabulary is not split, even if no merges produce it.
    ignore_merges: bool = False
    # Default of `add_bos_token`.
    add_bos: bool = False


def splitting_of(name: str) -> Splitting:
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer '{name}' is not supported; supported: {', '.join(sorted(_SPLITTINGS))}"
        )
    return splitting


def names_of_splittings() -> list[str]:
    """One for each way to split."""
    names: dict[int, str] = {}
    for name, splitting in _SPLITTINGS.items():
        names.setdefault(id(splitting.pre_tokenizer), name)
    return list(names.values())


def _cut(*steps: str | PreTokenizer) -> PreTokenizer:
    """Each step splits the pieces of the previous one; a regular expression isolates its matches."""
    cuts = [Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _capitalised(suffix: str = "") -> str:
    """Words split at case changes: Word, WORD, but word|Order."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    mark = r"[^\r\n\p{L}\p{N}]?"
    return f"{mark}{upper}*{lower}+{suffix}|{mark}{upper}+{lower}*{suffix}"


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, except those recently added to Unicode and mathematical alphabets: the set that deepseek-llm's
# tokenizer lists letter by letter.
_DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a]]"
)

_GPT2 = Splitting(ByteLevel(add_prefix_space=False))
_STARCODER = Splitting(Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]))
_LLAMA3 = Splitting(
    _cut(rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"),
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = Splitting(_cut(rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACE}"), compose=True)
_QWEN35 = Splitting(
    _cut(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
    ),
    compose=True,
)
_DEEPSEEK_LLM = Splitting(
    _cut(
        "[\r\n]",
        rf"\s?{_DEEPSEEK_LETTER}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        Digits(individual_digits=True),
    )
)
_DEEPSEEK_CODER = Splitting(
    _cut("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, Digits(individual_digits=True)),
)
_DEEPSEEK_V3 = Splitting(
    _cut(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACE,
    )
)
_FALCON = Splitting(
    Sequence(
        [
            Punctuation("contiguous"),
            ByteLevel(add_prefix_space=False),
            Digits(individual_digits=False),
            Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
)
_TEKKEN = Splitting(
    _cut(rf"{_capitalised()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"),
    ignore_merges=True,
    add_bos=True,
)
_GPT4O = Splitting(
    _cut(
        rf"{_capitalised(_CONTRACTION + '?')}|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
    )
)
_BLOOM = Splitting(_cut(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"))

_COMPOSED_GPT2 = replace(_GPT2, compose=True)
_LLAMA3_BY_MERGES = replace(_LLAMA3, ignore_merges=False, add_bos=False)

_SPLITTINGS: dict[str, Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "mellum": _GPT2,
    "gpt-neox": _COMPOSED_GPT2,
    "mpt": _COMPOSED_GPT2,
    "olmo": _COMPOSED_GPT2,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "codeshell": _STARCODER,
    "command-r": replace(_STARCODER, compose=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3_BY_MERGES,
    "smaug-bpe": _LLAMA3_BY_MERGES,
    "glm4": _LLAMA3_BY_MERGES,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "falcon": _FALCON,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "bloom": _BLOOM,
}
