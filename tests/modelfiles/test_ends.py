"""Which tokens end a generation: config files and the tokenizer may each name some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from legato.modelfiles.files import ModelFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_the_end_token_of_the_tokenizer_ends_a_generation_too(folder: Path) -> None:
    """Fine-tuned models change that one, and keep the generation_config.json of their base."""
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert ModelFiles.open(folder).eos_token_ids() == [7, 2]
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 2}')
    assert ModelFiles.open(folder).eos_token_ids() == [7]  # the model cannot generate it


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, [2]),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "special": True}}}, [2]),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, [2]),
        ({"tokenizer_config.json": {"eos_token": "e", "added_tokens_decoder": {"9": {"content": "e"}}}}, [9]),
        ({"tokenizer_config.json": {"eos_token": "nowhere"}}, []),
        ({"tokenizer_config.json": {"eos_token": None}}, []),
        ({"tokenizer_config.json": {"eos_token": "e", "added_tokens_decoder": [1]}}, []),
        ({"config.json": {"model_type": "gemma3", "text_config": {"eos_token_id": [1, 6]}}}, [1, 6]),
    ],
)
def test_without_an_eos_token_id_the_tokenizer_says_what_ends_a_text(
    files: dict[str, Any], expected: list[int], folder: Path
) -> None:
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        (folder / name).write_text(json.dumps(content))
    assert ModelFiles.open(folder).eos_token_ids() == expected


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json"])
def test_the_end_token_is_found_in_older_files(name: str, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text('{"model_type": "opt"}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / name).write_text('{"a": 0, "</s>": 5}')
    assert ModelFiles.open(folder).eos_token_ids() == [5]
    for malformed in ("{", "[" * 100_000, '{"a":' * 100_000):
        (folder / name).write_text(malformed)
        assert ModelFiles.open(folder).eos_token_ids() == []


def test_a_malformed_tokenizer_is_for_its_reader_to_report(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "tokenizer.json").write_text('{"a":' * 100_000)
    assert ModelFiles.open(folder).eos_token_ids() == []


def test_an_adapter_that_brings_its_tokenizer_brings_its_end_token(folder: Path) -> None:
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "vocab_size": 4}')
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "peft_type": "LORA", "r": 2}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert ModelFiles.open(folder).eos_token_ids() == [1, 2]
