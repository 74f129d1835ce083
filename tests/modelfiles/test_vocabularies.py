"""Tokenizers without tokenizer.json against transformers: the same tokens for hostile and random strings.

`make test-tokenizers` compares 10,000 strings each, and adds published vocabularies; `make test` a few of them.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.files import ModelFiles
from tests.modelfiles import vocabulary_files as made

NUM_STRINGS = int(os.environ.get("TOKENIZER_STRINGS", "60"))
LLAMA = dict(byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False)
GEMMA = dict(LLAMA, add_dummy_prefix=False, unk_id=3, bos_id=2, eos_id=1, pad_id=0, bos_piece="<bos>",
             eos_piece="<eos>", user_defined_symbols=["\n\n", "<mask>"])  # fmt: skip
JOINING = {"Mn", "Mc", "Me", "Cf"}
T5 = dict(unk_id=2, bos_id=-1, eos_id=1, pad_id=0)


def object_token(text: str, **more: Any) -> dict[str, Any]:
    return dict(content=text, lstrip=False, rstrip=False, normalized=True, single_word=False) | more


def opt(folder: Path) -> None:
    end = object_token("</s>", __type="AddedToken")
    config = dict(bos_token=end, eos_token=end, unk_token=end, pad_token=object_token("<pad>", __type="AddedToken"),
                  add_prefix_space=False, add_bos_token=True, tokenizer_class="GPT2Tokenizer")  # fmt: skip
    made.write_config(folder, "opt", config)
    made.write_merges(folder, ["<s>", "<pad>", "</s>"])


def gpt2(folder: Path) -> None:
    made.write_config(folder, "gpt2", None)
    made.write_merges(folder, ["<|endoftext|>"])


def gpt2_with_prefix_space(folder: Path) -> None:
    made.write_config(folder, "gpt2", dict(add_prefix_space=True, tokenizer_class="GPT2Tokenizer"))
    made.write_merges(folder, ["<|endoftext|>"])


def codegen(folder: Path) -> None:
    config = dict(tokenizer_class="CodeGenTokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    size = made.write_merges(folder, ["<|endoftext|>"])
    made.write_config(folder, "codegen", config, added_tokens={"  ": size, "\t\t": size + 1})


def gpt_neox(folder: Path) -> None:
    made.write_config(folder, "gpt_neox", dict(tokenizer_class="GPTNeoXTokenizer"))
    made.write_merges(folder, ["<|endoftext|>", "<|padding|>"])


def bart(folder: Path) -> None:
    made.write_config(folder, "bart", dict(tokenizer_class="BartTokenizer"))
    made.write_merges(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])


def qwen2(folder: Path) -> None:
    size = made.write_merges(folder)
    added = {str(size): object_token("<|endoftext|>", special=True, normalized=False),
             str(size + 1): object_token("<|im_start|>", special=True, normalized=False),
             str(size + 2): object_token("user", special=False)}  # fmt: skip
    config = dict(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added, bos_token=None,
                  eos_token="<|endoftext|>", pad_token="<|endoftext|>", unk_token=None)  # fmt: skip
    made.write_config(folder, "qwen2", config)


def t5(folder: Path) -> None:
    config = dict(tokenizer_class="T5Tokenizer", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", extra_ids=100)
    made.write_config(folder, "t5", config)
    made.write_pieces(folder / "spiece.model", "unigram", normalization_rule_name="nmt_nfkc", **T5)


def mt5(folder: Path) -> None:
    config = dict(extra_ids=0, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", tokenizer_class="T5Tokenizer",
                  additional_special_tokens=None)  # fmt: skip
    made.write_config(
        folder, "mt5", config, special_tokens_map=dict(eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    )
    made.write_pieces(folder / "spiece.model", "unigram", byte_fallback=False, normalization_rule_name="nmt_nfkc", **T5)


def pegasus(folder: Path) -> None:
    config = dict(tokenizer_class="PegasusTokenizer", mask_token_sent="<mask_1>", mask_token="<mask_2>", offset=103)
    made.write_config(folder, "pegasus", config)
    made.write_pieces(folder / "spiece.model", "unigram", normalization_rule_name="nmt_nfkc", **T5)


def llama(folder: Path, **settings: Any) -> None:
    made.write_config(folder, "llama", dict(tokenizer_class="LlamaTokenizer", add_bos_token=True, **settings))
    made.write_pieces(folder / "tokenizer.model", "bpe", vocab_size=700, **LLAMA)


def llama_legacy(folder: Path) -> None:
    special = {role: object_token(text, __type="AddedToken") for role, text in
               (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))}  # fmt: skip
    llama(folder, legacy=True, add_eos_token=True, **special)


def llama_without_prefix(folder: Path) -> None:
    llama(folder, add_prefix_space=False)


def mistral(folder: Path) -> None:
    llama(folder, legacy=False, additional_special_tokens=[])
    made.write_pieces(
        folder / "tokenizer.model", "bpe", vocab_size=700, user_defined_symbols=["[INST]", "[/INST]"], **LLAMA
    )


def code_llama(folder: Path) -> None:
    made.write_config(folder, "llama", dict(tokenizer_class="CodeLlamaTokenizer", fill_token=None))
    symbols = ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
    made.write_pieces(folder / "tokenizer.model", "bpe", vocab_size=700, user_defined_symbols=symbols, **LLAMA)


def gemma(folder: Path) -> None:
    made.write_config(folder, "gemma", dict(tokenizer_class="GemmaTokenizer", add_bos_token=True))
    made.write_pieces(folder / "tokenizer.model", "bpe", vocab_size=700, **GEMMA)


def llama3(folder: Path) -> None:
    size = made.write_tiktoken(folder / "tokenizer.model")
    added = {str(size + i): object_token(text, special=True, normalized=False)
             for i, text in enumerate(("<|begin_of_text|>", "<|endoftext|>", "<|eot_id|>"))}  # fmt: skip
    config = dict(tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=added, bos_token="<|begin_of_text|>",
                  eos_token="<|eot_id|>")  # fmt: skip
    made.write_config(folder, "llama", config)


CASES: list[Callable[[Path], None]] = [
    opt, gpt2, gpt2_with_prefix_space, codegen, gpt_neox, bart, qwen2, t5, mt5, pegasus, llama, llama_legacy,
    llama_without_prefix, mistral, code_llama, gemma, llama3,
]  # fmt: skip


def differences(ours: Tokenizer, theirs: Any, texts: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """Strings that get other ids, or whose ids are decoded to another text."""
    found = []
    for text in texts:
        one, other = ours.encode(text).ids, theirs(text)["input_ids"]
        if one != other or ours.decode(one) != theirs.decode(other, skip_special_tokens=True):
            found.append((text, [ours.id_to_token(i) for i in one], theirs.convert_ids_to_tokens(other)))
    return found


@pytest.mark.parametrize("write", CASES, ids=lambda case: case.__name__)
def test_ids_and_texts_equal_those_of_transformers(write: Callable[[Path], None], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    found = differences(ModelFiles.open(tmp_path).tokenizer(), theirs, made.strings(NUM_STRINGS))
    assert not found, f"{len(found)} of {NUM_STRINGS}: {found[:3]}"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("settings", [LLAMA, dict(add_dummy_prefix=False, byte_fallback=True), {}], ids=str)
def test_a_file_without_a_class_is_read_as_sentencepiece_does(kind: str, settings: Any, tmp_path: Path) -> None:
    """Baichuan's, and that of whoever has no class of its own."""
    import sentencepiece

    made.write_config(tmp_path, "baichuan", dict(tokenizer_class="BaichuanTokenizer"))
    made.write_pieces(tmp_path / "tokenizer.model", kind, **settings)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = ModelFiles.open(tmp_path).tokenizer()
    # What is between <> is a token here and text there; so is what stands for a space. Characters that join others are
    # normalized otherwise by the tokenizers library: with those around them.
    texts = [text for text in made.strings(NUM_STRINGS) if not set(text) & set("<>\u2581\x00")]
    texts = [text for text in texts if not {unicodedata.category(character) for character in text} & JOINING]
    # Of ways to cut a text that are equally likely, 00|0 and 0|00, the libraries take different ones.
    as_compared = list if kind == "bpe" else sorted
    pairs = [(text, ours.encode(text).ids, theirs.encode(text)) for text in texts]
    found = [pair for pair in pairs if as_compared(pair[1]) != as_compared(pair[2])]
    assert not found, f"{len(found)} of {len(texts)}: {found[:3]}"


def test_a_class_that_is_not_converted_is_named(tmp_path: Path) -> None:
    made.write_config(tmp_path, "xglm", dict(tokenizer_class="XGLMTokenizer"))
    made.write_pieces(tmp_path / "sentencepiece.bpe.model", "unigram")
    with pytest.raises(UnsupportedModel, match=r"class 'XGLMTokenizer' is not converted .* known: .*T5Tokenizer"):
        ModelFiles.open(tmp_path).tokenizer()


def test_without_any_vocabulary_every_file_is_named(tmp_path: Path) -> None:
    made.write_config(tmp_path, "opt", None)
    with pytest.raises(ModelFileError, match=r"tokenizer.json is missing, and so are vocab.json with merges.txt"):
        ModelFiles.open(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.model", b"", "neither a SentencePiece nor a tiktoken file|cannot be converted"),
        ("tokenizer.model", b"\n\xff\xff\xff", "is not a SentencePiece model"),
        ("tokenizer.model", b"\n\x03abc", "is not a SentencePiece model"),
        ("tokenizer.model", b"not base64 at all\n", "neither a SentencePiece nor a tiktoken file"),
        ("spiece.model", b"\n" + b"\x80" * 20, "is not a SentencePiece model"),
    ],
)
def test_a_malformed_file_is_named(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    made.write_config(tmp_path, "llama", None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=reason):
        ModelFiles.open(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("vocab", "merges", "reason"),
    [
        ("[]", "a b\n", "must map tokens to numbers"),
        ("{", "a b\n", "malformed"),
        ('{"a": 0, "b": 1}', "a\n", "expected two tokens that make"),
        ('{"a": 0, "b": 1}', "a b\n", "expected two tokens that make"),
    ],
)
def test_malformed_merges_are_named(vocab: str, merges: str, reason: str, tmp_path: Path) -> None:
    made.write_config(tmp_path, "gpt2", None)
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ModelFileError, match=reason):
        ModelFiles.open(tmp_path).tokenizer()


def test_a_token_that_cannot_have_its_number_is_named(tmp_path: Path) -> None:
    size = made.write_merges(made.write_config(tmp_path, "gpt2", None))
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {str(size + 9): object_token("<far>")}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=f"'<far>' should be {size + 9}, but is {size}"):
        ModelFiles.open(tmp_path).tokenizer()
