"""`download-weights` on models that were published as pickles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors import safe_open
from safetensors.torch import load_file

from legato.common.errors import ModelFileError
from legato.common.options import DownloadOptions
from legato.common.program import command, run_program
from legato.modelfiles import huggingface as hub_huggingface
from legato.modelfiles.files import INDEX, ModelFiles
from legato.server import convert as converting
from legato.server.cli import download_weights
from legato.server.convert import PICKLE_INDEX, SINGLE_PICKLE, convert
from tests.server.local import load as load_model
from tests.tiny_models import tiny_llama

Tensors = dict[str, torch.Tensor]


class Payload:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def pickled(folder: Path, *files: Tensors) -> Path:
    """A folder as older publishers wrote it: one file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if len(files) == 1:
        torch.save(files[0], folder / SINGLE_PICKLE)
        return folder
    where = {}
    for number, tensors in enumerate(files, 1):
        name = f"pytorch_model-{number:05}-of-{len(files):05}.bin"
        torch.save(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def download(*words: str) -> int:
    group = click.Group("text-generation-server")
    group.add_command(command(DownloadOptions, download_weights, "download-weights", "."))
    return run_program(group, ["download-weights", *words])


def test_every_tensor_is_what_it_was(tmp_path: Path) -> None:
    tensors = {
        "half": numbers(3, 4, dtype=torch.bfloat16),
        "turned": numbers(4, 6).t(),
        "nothing": torch.empty(0),
        "scalar": torch.tensor(float("nan")),
        "counts": torch.arange(5),
    }
    assert convert(pickled(tmp_path, tensors)) == [tmp_path / "model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_files_say_that_they_are_pytorchs(tmp_path: Path) -> None:
    convert(pickled(tmp_path, {"a": numbers(2)}))
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tied_weights_keep_the_embedding(tmp_path: Path) -> None:
    embedding = numbers(8, 4)
    convert(pickled(tmp_path, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}))
    assert load_file(tmp_path / "model.safetensors").keys() == {"model.embed_tokens.weight"}


def test_parts_of_one_memory_are_tensors_of_their_own(tmp_path: Path) -> None:
    fused = numbers(6, 4)
    parts = {"q": fused[:2], "k": fused[2:4], "v": fused[4:], "all": fused}
    convert(pickled(tmp_path, parts))
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], part) for name, part in parts.items())


def test_several_files_get_an_index(tmp_path: Path) -> None:
    convert(pickled(tmp_path, {"a": numbers(2, 2), "b": numbers(3)}, {"c": numbers(4)}))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {"metadata": {"total_size": 44}, "weight_map": {"a": first, "b": first, "c": second}}
    assert [file.name for file in ModelFiles.open(tmp_path).weight_files()] == [first, second]


def test_the_converted_model_answers_as_before(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    before = load_model(folder).embedding.weight  # type: ignore[attr-defined]
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / SINGLE_PICKLE)
    assert download(str(folder)) == 0
    after = load_model(folder)
    assert torch.equal(after.embedding.weight, before)  # type: ignore[attr-defined]
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()


def test_files_from_before_torch_1_6_can_be_read(tmp_path: Path) -> None:
    pickled(tmp_path, {})
    torch.save({"a": numbers(3)}, tmp_path / SINGLE_PICKLE, _use_new_zipfile_serialization=False)
    convert(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], numbers(3))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, is_zip: bool) -> None:
    pickled(tmp_path, {})
    torch.save({"a": Payload(tmp_path / "ran")}, tmp_path / SINGLE_PICKLE, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin is a pickle that contains more than tensors .*posix"):
        convert(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "pytorch_model.bin cannot be read: EOFError"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pytorch_model.bin is not a file of tensors"),
    ],
)
def test_a_file_that_is_no_pickle_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    pickled(tmp_path, {})
    (tmp_path / SINGLE_PICKLE).write_bytes(content)
    with pytest.raises(ModelFileError, match=sentence):
        convert(tmp_path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    file = pickled(tmp_path, {"a": numbers(1000)}) / SINGLE_PICKLE
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin cannot be read: .*; download it again"):
        convert(tmp_path)


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    pickled(tmp_path, {"a": "text"})  # type: ignore[dict-item]
    with pytest.raises(ModelFileError, match="does not contain named tensors"):
        convert(tmp_path)


def test_half_a_model_is_not_left_behind(tmp_path: Path) -> None:
    pickled(tmp_path, {"a": numbers(2)}, {"b": numbers(2)})
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match="00002-of-00002"):
        convert(tmp_path)
    assert not list(tmp_path.glob("*safetensors*"))


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    pickled(tmp_path, {"a": numbers(2)}, {"b": numbers(2)})
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00002.bin is missing, though pytorch_model.bin.index.json"):
        convert(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    pickled(tmp_path, {"a": numbers(2)}, {"b": numbers(2)})
    (tmp_path / PICKLE_INDEX).write_text(json.dumps({"weight_map": {"a": "../other.bin"}}))
    with pytest.raises(ModelFileError, match="outside the folder"):
        convert(tmp_path)


def test_what_is_not_on_the_disk_as_it_was_read_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(tensors: Tensors, file: Path, metadata: dict[str, str]) -> None:
        save({name: tensor + (name == "b") for name, tensor in tensors.items()}, file, metadata=metadata)

    save = converting.save_file
    monkeypatch.setattr(converting, "save_file", spoiled)
    with pytest.raises(ModelFileError, match="'b' differs from what was written"):
        convert(pickled(tmp_path, {"a": numbers(2), "b": numbers(2)}))
    assert not [file for file in tmp_path.iterdir() if "safetensors" in file.name]


def test_a_model_with_safetensors_is_left_alone(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    torch.save({"a": Payload(tmp_path / "ran")}, folder / SINGLE_PICKLE)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert download(str(folder)) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_without_auto_convert_pickles_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert download(str(pickled(tmp_path, {"a": numbers(2)})), "--no-auto-convert") == 1
    assert "pytorch_model.bin is a pickle" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))


def test_pt_files_are_converted_unless_there_are_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.pt", "optimizer.pt", "training_args.bin"):
        torch.save({"a": numbers(2)}, tmp_path / name)
    assert download(str(tmp_path)) == 0
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_the_folder_of_the_override_is_converted(tmp_path: Path) -> None:
    folder = pickled(tmp_path, {"a": numbers(2)})
    assert download("some/model", "--weights-cache-override", str(folder)) == 0
    assert (folder / "model.safetensors").exists()


class TestHub:
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def snapshot(self, cache: Path) -> Path:
        """What the Hub's cache looks like: the snapshot of a branch."""
        model = cache / "models--org--old"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(self.COMMIT)
        (model / "refs" / "v2").write_text(self.COMMIT)
        return pickled(model / "snapshots" / self.COMMIT, {"a": numbers(2)})

    @pytest.fixture
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: "HF_HUB_OFFLINE is set")

    @pytest.mark.parametrize("words", [[], ["--revision", "v2"]])
    def test_offline_the_pickles_of_the_cache_are_converted(
        self, tmp_path: Path, offline: None, words: list[str]
    ) -> None:
        snapshot = self.snapshot(tmp_path)
        assert download("org/old", "--huggingface-hub-cache", str(tmp_path), *words) == 0
        assert (snapshot / "model.safetensors").exists()

    def test_offline_a_revision_that_is_not_there_is_an_error(
        self, tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.snapshot(tmp_path)
        assert download("org/old", "--huggingface-hub-cache", str(tmp_path), "--revision", "v3") == 1
        assert "HF_HUB_OFFLINE is set, and the cache has no copy" in capsys.readouterr().err

    def test_pickles_of_the_same_revision_are_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = self.snapshot(tmp_path)
        tensors = (snapshot / SINGLE_PICKLE).read_bytes()
        (snapshot / SINGLE_PICKLE).unlink()
        asked = []

        def fetch(repo_id: str, name: str, *, revision: str, cache_dir: Path) -> None:
            asked.append((repo_id, name, revision, cache_dir))
            (snapshot / name).write_bytes(tensors)

        names = ["config.json", "training_args.bin", "onnx/model.bin", SINGLE_PICKLE]
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: None)
        monkeypatch.setattr(hub_huggingface, "_download", lambda *_: snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: names)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
        assert download("org/old") == 0
        assert asked == [("org/old", SINGLE_PICKLE, self.COMMIT, tmp_path)]
        assert (snapshot / "model.safetensors").exists()

    def test_a_fetch_that_fails_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OfflineModeIsEnabled("no")

        snapshot = self.snapshot(tmp_path)
        (snapshot / SINGLE_PICKLE).unlink()
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: None)
        monkeypatch.setattr(hub_huggingface, "_download", lambda *_: snapshot)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
        assert download("org/old") == 1
        assert "org/old: HF_HUB_OFFLINE is set, and its weights are not in the cache" in capsys.readouterr().err
