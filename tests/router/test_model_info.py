"""What /info says of a model, by its files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legato.common.options import RouterOptions
from legato.pb import generate_pb2 as pb
from legato.router.cli import settings_for
from legato.router.model_info import BuildInfo, model_sha, pipeline_tag

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """As the Hub's cache keeps it."""
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_snapshot_tells_its_commit(snapshot: Path) -> None:
    assert model_sha(snapshot) == COMMIT


def test_a_file_in_a_snapshot_tells_its_commit(snapshot: Path) -> None:
    assert model_sha(snapshot / "model.gguf") == COMMIT


def test_another_folder_has_no_commit(tmp_path: Path) -> None:
    assert model_sha(tmp_path) is None
    assert model_sha(tmp_path / "snapshots" / "backup") is None


def test_a_text_model_has_the_tag_of_the_hub_unless_it_is_a_folder(snapshot: Path) -> None:
    assert pipeline_tag(snapshot, from_hub=True, has_encoder=False) == "text-generation"
    assert pipeline_tag(snapshot, from_hub=False, has_encoder=False) is None
    assert pipeline_tag(snapshot, from_hub=True, has_encoder=True) == "text2text-generation"


@pytest.mark.parametrize("from_hub", [True, False])
def test_a_vision_model_never_counts_as_text_generation(snapshot: Path, from_hub: bool) -> None:
    """Otherwise `POST /` would send the picture of the prompt back."""
    config = {"model_type": "qwen2_vl", "image_token_id": 7, "vision_config": {}}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert pipeline_tag(snapshot, from_hub=from_hub, has_encoder=False) == "image-text-to-text"


def test_the_build_is_what_the_image_says() -> None:
    assert BuildInfo.of({"GIT_SHA": COMMIT, "DOCKER_LABEL": "cuda"}) == BuildInfo(COMMIT, "cuda")
    assert BuildInfo.of({"GIT_SHA": ""}) == BuildInfo(None, None)


@pytest.mark.parametrize(
    ("environ", "shown"), [({}, "cpu"), ({"COMPUTE_TYPE": ""}, "cpu"), ({"COMPUTE_TYPE": "a"}, "a")]
)
def test_the_compute_type_is_the_variable_s_or_the_device_s(
    environ: dict[str, str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPUTE_TYPE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    options = RouterOptions(model_id=str(tmp_path))
    assert settings_for(options, pb.InfoResponse(device_type="cpu"), {}, tmp_path).compute_type == shown
