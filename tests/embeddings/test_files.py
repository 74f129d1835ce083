"""What the files around a checkpoint say of pooling, modules, prompts and labels, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from legato.common.errors import LegatoError, ModelFileError, OptionError, UnsupportedModel
from legato.common.options import ServerOptions
from legato.modelfiles.embedding import EmbeddingFiles
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.index import _main_file
from legato.models.encoders.batch import EncodedText
from legato.models.encoders.registry import load_encoder
from legato.server.embedding.loading import refuse_options
from tests.embeddings.tiny_encoders import tiny_encoder, token_vectors, write_modules

CPU = torch.device("cpu")
IDS = [5, 9, 200, 31]


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", {"model_type": "bert", "architectures": ["BertModel"]})
    return tmp_path


def read(folder: Path) -> EmbeddingFiles:
    return EmbeddingFiles.read(ModelFiles.open(folder))


def test_without_files_nothing_is_said_and_embeddings_are_normalized(folder: Path) -> None:
    assert read(folder) == EmbeddingFiles(prompts={})


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_modules_say_pooling_and_normalization(folder: Path, pooling: str, normalize: bool) -> None:
    write_modules(folder, pooling, normalize=normalize, max_tokens=77)
    found = read(folder)
    assert (found.pooling, found.normalized, found.max_tokens) == (pooling, normalize, 77)


def test_the_newer_key_of_the_pooling_is_read(folder: Path) -> None:
    write_modules(folder)
    write(folder, "1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": "lasttoken"})
    assert read(folder).pooling == "last"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean, cls"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        ("modules.json", [{"type": "sentence_transformers.models.CNN", "path": "1"}], "models.CNN"),
        ("modules.json", [{"type": "x.Dense", "path": "../other"}], "outside"),
        ("modules.json", {"a": 1}, "list of objects"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}, "query"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts"),
    ],
)
def test_what_cannot_be_served_is_named(folder: Path, name: str, value: Any, words: str) -> None:
    write_modules(folder)
    write(folder, name, value)
    with pytest.raises((UnsupportedModel, ModelFileError), match=words):
        read(folder)


def test_prompts_and_labels_are_read(folder: Path) -> None:
    write(folder, "config_sentence_transformers.json", {"prompts": {"q": "ask: "}, "default_prompt_name": "q"})
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "n", "1": "y"},
    }
    write(folder, "config.json", config)
    found = read(folder)
    assert (found.prompts, found.default_prompt, found.labels) == ({"q": "ask: "}, "q", ("n", "y"))


def test_a_dense_module_follows_the_pooling(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path, "Bert")
    write_modules(folder)
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(2, {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    write(folder, "modules.json", listed)
    write(folder, "2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    weight, bias = torch.randn(8, 64) * 0.1, torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
    found = load_encoder(ModelFiles.open(folder), torch.float32, CPU).vectors([EncodedText(IDS)])[0]
    expected = torch.tanh(weight @ token_vectors(folder, IDS).mean(0) + bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_flag_overrides_the_file(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path, "Bert")
    write_modules(folder, "mean")
    found = load_encoder(ModelFiles.open(folder), torch.float32, CPU, pooling="cls").vectors([EncodedText(IDS)])[0]
    torch.testing.assert_close(found, token_vectors(folder, IDS)[0], atol=1e-5, rtol=0)


def test_a_classifier_has_no_pooling_to_choose(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    with pytest.raises(OptionError, match="--pooling"):
        load_encoder(ModelFiles.open(folder), torch.float32, CPU, pooling="cls")


def test_other_architectures_are_refused_with_those_that_are_supported(folder: Path) -> None:
    write(folder, "config.json", {"model_type": "mpnet"})
    with pytest.raises(LegatoError, match=r"'mpnet' is not supported with --task embed; supported: bert"):
        load_encoder(ModelFiles.open(folder), torch.float32, CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "int8"}, "--quantize int8"),
        ({"world_size": 2}, "--num-shard 1"),
        ({"lora_adapters": "a"}, "--lora-adapters"),
        ({"speculate": 2}, "--speculate"),
        ({"rope_factor": 2.0}, "--rope-factor"),
    ],
)
def test_options_of_generation_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        refuse_options(ServerOptions(task="embed", **options))


def test_a_package_may_have_modules_below_the_model(tmp_path: Path) -> None:
    for name in ("package/model/config.json", "package/model/1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert _main_file("package", tmp_path) == "package/model"
