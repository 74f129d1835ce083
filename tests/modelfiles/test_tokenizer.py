"""Tokenizers rebuilt from GGUF metadata against the tokenizers that the metadata was taken from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from legato.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from legato.modelfiles import hub
from legato.modelfiles.gguf.file import GgufFile
from legato.modelfiles.gguf.splitting import splitting_of
from legato.modelfiles.gguf.tokenizer import tokenizer_from_gguf
from legato.modelfiles.tokenizers import load_tokenizer
from tests.modelfiles.gguf_files import write_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? They're here; WE'LL see. I'd say 12345 times.",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2, 3]}  # comment\n\n\tif x != 10_000:\r\n\t\tpass",
    "Größe, naïve café, Ελληνικά, Русский текст, 日本語のテキスト。中文，한국어 텍스트, עברית, ไทย",
    "🚀 to the moon 👨‍👩‍👧‍👦! 3.14159 ½ ² ٣٤ — “quotes” … end.   spaces    here",
]
NASTY = [
    "",
    " ",
    "Hello  world   !",
    "\t\n \r\n\n  x",
    "I'm you're WE'LL 'S'Re'",
    "123456789 1,000.00 0x1F ½ ² ٣٤ Ⅷ",
    "éàü e\u0301 ﬁ Å",
    "🚀👨‍👩‍👧‍👦🏳️‍🌈",
    "日本語。中文，한국어",
    "<|end|>text<|end|> <|tool|> </s> <0x0A>",
    "\u200b\u00a0\u3000x\x00\x7f",
    "a" * 40 + " " * 9 + "!?" * 9,
    "CamelCaseHTMLParser snake_case(x)[0];//ok",
]
# Published tokenizer.json files of the models, step by step.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "deepseek-coder": [
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥ࠀ-一가-퟿]+",
        pre_tokenizers.Digits(individual_digits=True),
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_tokenizer(pre: str) -> Tokenizer:
    """A small tokenizer trained the way the models' own are."""
    steps = PUBLISHED[pre]
    cuts = [pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    if not any(isinstance(cut, pre_tokenizers.ByteLevel) for cut in cuts):
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(["<|tool|>"])
    return tokenizer


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    return [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_vocabulary(path: Path, **entries: Any) -> GgufFile:
    """A GGUF file with a vocabulary and nothing else."""
    write_gguf(path, {f"tokenizer.ggml.{name}": value for name, value in entries.items()})
    return GgufFile.open(path)


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **more: Any) -> GgufFile:
    tokens = tokens_of(tokenizer)
    types = {"<s>": CONTROL, "<|end|>": CONTROL, "<|tool|>": USER_DEFINED}
    return write_vocabulary(
        path,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[types.get(token, NORMAL) for token in tokens],
        merges=merges_of(tokenizer),
        bos_token_id=0,
        eos_token_id=1,
        **more,
    )


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_tokens_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer(pre)
    rebuilt = tokenizer_from_gguf(write_byte_level(tmp_path / "v.gguf", original, pre))
    for text in CORPUS + NASTY:
        assert rebuilt.encode(text, add_special_tokens=False).ids == original.encode(text).ids, text


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "deepseek-coder"])
def test_byte_level_text_survives_the_round_trip(pre: str, tmp_path: Path) -> None:
    rebuilt = tokenizer_from_gguf(write_byte_level(tmp_path / "v.gguf", byte_level_tokenizer(pre), pre))
    for text in CORPUS + NASTY:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert rebuilt.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_skipped_in_output_and_user_defined_ones_shown(tmp_path: Path) -> None:
    rebuilt = tokenizer_from_gguf(write_byte_level(tmp_path / "v.gguf", byte_level_tokenizer("smollm"), "smollm"))
    encoded = rebuilt.encode("<|end|><|tool|>", add_special_tokens=False)
    assert encoded.tokens == ["<|end|>", "<|tool|>"]
    assert rebuilt.decode(encoded.ids) == "<|tool|>"


def test_an_unmarked_end_token_is_special(tmp_path: Path) -> None:
    tokens = [*"ab", "<eos>"]
    gguf_file = write_vocabulary(tmp_path / "v.gguf", model="gpt2", tokens=tokens, merges=[], eos_token_id=2)
    assert tokenizer_from_gguf(gguf_file).encode("a<eos>b").ids == [0, 2, 1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "ab"),
        ({"add_bos_token": True}, "<s>ab"),
        ({"add_bos_token": True, "add_eos_token": True}, "<s>ab<|end|>"),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(flags: dict[str, bool], expected: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer("gpt-2")
    rebuilt = tokenizer_from_gguf(write_byte_level(tmp_path / "v.gguf", original, "gpt-2", **flags))
    assert rebuilt.decode(rebuilt.encode("ab").ids, skip_special_tokens=False) == expected


def test_llama_3_adds_bos_by_default(tmp_path: Path) -> None:
    original = byte_level_tokenizer("llama-bpe")
    rebuilt = tokenizer_from_gguf(write_byte_level(tmp_path / "v.gguf", original, "llama-bpe"))
    assert rebuilt.encode("ab").ids[0] == 0


def test_llama_3_keeps_words_that_no_merges_produce(tmp_path: Path) -> None:
    entries = {"model": "gpt2", "tokens": [*"abc", "abc"], "merges": []}
    ids = {
        pre: tokenizer_from_gguf(write_vocabulary(tmp_path / f"{pre}.gguf", pre=pre, **entries)).encode("abc").ids
        for pre in ("llama-bpe", "gpt-2")
    }
    assert ids == {"llama-bpe": [3], "gpt-2": [0, 1, 2]}


def test_the_letters_of_deepseek_llm_match_its_tokenizer() -> None:
    cut = splitting_of("deepseek-llm").pre_tokenizer
    # A word may hold é, Ω and Ж; not ՠ, which is in Unicode since version 11, and not the mathematical 𝔘.
    words = {text: len(cut.pre_tokenize_str(text)) for text in ("éΩЖ", "éՠ", "é𝔘", "é𝔘Ж")}
    assert words == {"éΩЖ": 1, "éՠ": 2, "é𝔘": 2, "é𝔘Ж": 3}


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    gguf_file = write_vocabulary(tmp_path / "v.gguf", model="gpt2", pre="martian", tokens=["a"], merges=[])
    with pytest.raises(UnsupportedModel, match=r"martian.*gpt-2.*smollm"):
        tokenizer_from_gguf(gguf_file)


def test_an_unknown_tokenizer_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'bert'.*gpt2, llama"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", model="bert", tokens=["a"]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "gpt2"}, "no vocabulary"),
        ({"model": "gpt2", "tokens": ["a", "b"], "token_type": [1]}, "one entry per token"),
        ({"model": "gpt2", "tokens": ["a", "b"], "merges": ["a b"]}, "the merge 'a b'"),
        ({"model": "gpt2", "tokens": ["a"], "merges": [], "eos_token_id": 7}, "eos_token_id is 7"),
        ({"model": "llama", "tokens": ["a"], "scores": ["x"]}, "invalid tokenizer metadata"),
    ],
)
def test_a_malformed_vocabulary_names_the_file(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"v\.gguf.*{message}"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", **entries))


def test_a_broken_tokenizer_json_is_reported_by_name(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0", "model": ')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(file)


class SentencePieceVocabulary:
    """A vocabulary with scores, and SentencePiece's algorithm in its plainest form: the definition to compare with."""

    def __init__(self, add_space_prefix: bool) -> None:
        self.add_space_prefix = add_space_prefix
        trained = Tokenizer(BPE())
        trained.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
        trained.train_from_iterator([*CORPUS * 3, "aaaa aaaaaaa abab ababab  aaa"], trainer)
        pieces = tokens_of(trained)
        self.tokens = ["<unk>", "<s>", "</s>", "<|tool|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        self.types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(pieces)
        self.scores = [0.0] * 260 + [float(-rank) for rank in range(len(pieces))]
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def write(self, path: Path) -> GgufFile:
        return write_vocabulary(
            path,
            model="llama",
            tokens=self.tokens,
            scores=self.scores,
            token_type=self.types,
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            add_space_prefix=self.add_space_prefix,
        )

    def encode(self, text: str) -> list[int]:
        symbols = list(("▁" if self.add_space_prefix and text else "") + text.replace(" ", "▁"))
        while True:
            joined = [(self.score(a + b), -at) for at, (a, b) in enumerate(pairwise(symbols))]
            best = max((pair for pair in joined if pair[0] is not None), default=None)
            if best is None:
                return [token_id for symbol in symbols for token_id in self.symbol_ids(symbol)]
            at = -best[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]

    def score(self, piece: str) -> float | None:
        token_id = self.ids.get(piece)
        return self.scores[token_id] if token_id is not None and self.types[token_id] == NORMAL else None

    def symbol_ids(self, symbol: str) -> list[int]:
        if symbol in self.ids:
            return [self.ids[symbol]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def sentence_piece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SentencePieceVocabulary, Tokenizer]]:
    vocabulary = SentencePieceVocabulary(add_space_prefix=request.param)
    yield vocabulary, tokenizer_from_gguf(vocabulary.write(tmp_path_factory.mktemp("spm") / "v.gguf"))


def without_whole_tokens(text: str) -> bool:
    return not any(token in text for token in ("<s>", "</s>", "<unk>", "<|tool|>"))


def test_sentence_piece_tokens_are_those_of_the_definition(
    sentence_piece: tuple[SentencePieceVocabulary, Tokenizer],
) -> None:
    vocabulary, rebuilt = sentence_piece
    for text in filter(without_whole_tokens, CORPUS + NASTY):
        assert rebuilt.encode(text, add_special_tokens=False).ids == vocabulary.encode(text), text


@given(text=st.text(st.sampled_from("ab e tho\né日🚀1"), max_size=40))
def test_sentence_piece_tokens_are_those_of_the_definition_for_any_text(
    sentence_piece: tuple[SentencePieceVocabulary, Tokenizer], text: str
) -> None:
    vocabulary, rebuilt = sentence_piece
    assert rebuilt.encode(text, add_special_tokens=False).ids == vocabulary.encode(text)


def test_sentence_piece_text_survives_the_round_trip(
    sentence_piece: tuple[SentencePieceVocabulary, Tokenizer],
) -> None:
    _, rebuilt = sentence_piece
    for text in filter(without_whole_tokens, CORPUS + NASTY):
        assert rebuilt.decode(rebuilt.encode(text).ids) == text


def test_sentence_piece_begins_with_bos_and_finds_whole_tokens(
    sentence_piece: tuple[SentencePieceVocabulary, Tokenizer],
) -> None:
    _, rebuilt = sentence_piece
    assert rebuilt.encode("<|tool|></s>").ids == [1, 3, 2]


def test_phi_3_drops_the_line_feed_behind_its_control_tokens(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "phi3")
    writer.add_name("Phi-3 mini")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<s>", "<|user|>", "a", "<0x0A>"])
    writer.add_token_types([CONTROL, CONTROL, NORMAL, BYTE])
    writer.add_token_scores([0.0] * 4)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert tokenizer_from_gguf(GgufFile.open(tmp_path / "v.gguf")).encode("<|user|>\na\na").ids == [1, 2, 3, 2]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return hub.resolve(hub.DEFAULT_PACKAGE)
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.mark.weights
def test_the_real_smollm2_vocabulary_gives_the_tokens_that_transformers_gives(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name).backend_tokenizer
    # It takes vocabulary, merges and special tokens from the file but cuts as GPT-2 does, whatever the file says.
    reference.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED["smollm"])
    rebuilt = tokenizer_from_gguf(GgufFile.open(smollm2))
    for text in [*CORPUS, *NASTY, "<|im_start|>user\nHi, 42!<|im_end|>\n"]:
        assert rebuilt.encode(text).ids == reference.encode(text).ids, text
