"""An adapter as the model: merged when it is loaded, or by `download-weights --merge-lora`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from legato.common.errors import ModelError, ModelFileError, ModelNotFound, UnsupportedModel
from legato.common.options import DownloadOptions
from legato.modelfiles.adapters import weights_file
from legato.modelfiles.files import ModelFiles, ModelFolder
from legato.modelfiles.merged import MergedModel
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from legato.server import cli
from tests.lora.tiny_adapters import peft_logits, random_prompts
from tests.models.answers import step_logits
from tests.server.local import DEVICE

pytestmark = pytest.mark.lora


def logits_of(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    files = ModelFiles.open(folder)
    return step_logits(get_model(files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE), prompts)


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["linear", "vocabulary"])
def test_a_model_with_an_adapter_merged_into_it_has_pefts_logits(
    base: Path, adapters: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(2, 320)
    wanted = peft_logits(base, adapters[name], prompts)
    assert isinstance(ModelFiles.open(adapters[name]), MergedModel)
    assert_same(logits_of(adapters[name], prompts), wanted)
    # The same on disk, in the folder itself.
    folder = shutil.copytree(adapters[name], tmp_path / "adapter")
    monkeypatch.setattr(cli, "setup", lambda *_: None)
    cli.download_weights(DownloadOptions(model_id=str(folder), merge_lora=True))
    files = ModelFiles.open(folder)
    assert isinstance(files, ModelFolder) and (folder / "tokenizer.json").is_file()
    assert_same(logits_of(folder, prompts), wanted)


def changed(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({"base_model_name_or_path": None}, ModelFileError, "'base_model_name_or_path' is missing"),
        ({"base_model_name_or_path": "/no/such/folder"}, ModelNotFound, "the base model '/no/such/folder' cannot be"),
        ({"use_dora": True}, UnsupportedModel, "'use_dora'"),
    ],
)
def test_a_base_model_that_cannot_be_used_is_named(
    adapters: dict[str, Path], tmp_path: Path, config: dict[str, object], error: type[ModelError], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        ModelFiles.open(changed(adapters["linear"], tmp_path / "a", **config))


def test_a_quantized_base_and_a_base_of_another_shape_are_refused(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    quantized = shutil.copytree(base, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    adapter = changed(adapters["linear"], tmp_path / "a", base_model_name_or_path=str(quantized))
    with pytest.raises(UnsupportedModel, match="serve that one with --lora-adapters"):
        ModelFiles.open(adapter)
    from tests.tiny_models import tiny_llama

    other = tiny_llama(tmp_path / "other", intermediate_size=64)
    adapter = changed(adapters["linear"], tmp_path / "b", base_model_name_or_path=str(other))
    with pytest.raises(ModelFileError, match="the adapter is for another model"):
        logits_of(adapter, [[5, 6]])


def test_a_pickled_adapter_is_refused_and_converted(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(adapters["linear"], tmp_path / "pickled")
    tensors = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="is a pickle, which Legato does not load"):
        weights_file(folder)
    monkeypatch.setattr(cli, "setup", lambda *_: None)
    cli.download_weights(DownloadOptions(model_id=str(folder)))
    converted = load_file(folder / "adapter_model.safetensors")
    assert converted.keys() == tensors.keys() and all(torch.equal(converted[name], tensors[name]) for name in tensors)
