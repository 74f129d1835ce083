"""The flags that TGI's launcher and people's init containers pass to `text-generation-server`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from legato.server.cli import main
from tests.tiny_models import tiny_llama

SHARD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["text-generation-server", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_download_weights_takes_the_extension_that_tgis_launcher_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_llama(tmp_path))
    words = ("download-weights", folder, "--extension", ".safetensors", "--logger-level", "INFO", "--json-output")
    assert run(monkeypatch, *words) == 0
    assert "Weights downloaded" in capsys.readouterr().out


def test_another_extension_is_refused_with_the_way_to_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "download-weights", "some/model", "--extension", ".bin") == 1
    assert "--extension .bin: Legato serves .safetensors files" in capsys.readouterr().err


def test_sharded_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in SHARD:
        monkeypatch.delenv(name, raising=False)
    assert run(monkeypatch, "serve", "some/model", "--sharded") == 1
    assert "--sharded needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in capsys.readouterr().err


def test_the_command_line_of_tgis_launcher_is_understood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the first thing that is really wrong: there is no such model."""
    for name, value in SHARD.items():
        monkeypatch.setenv(name, value)
    words = ["serve", "./no-such-model", "--uds-path", str(tmp_path / "shard"), "--logger-level", "INFO"]
    words += ["--json-output", "--sharded", "--dtype", "bfloat16", "--trust-remote-code", "--max-input-tokens", "1024"]
    words += ["--otlp-service-name", "text-generation-inference.server"]
    assert run(monkeypatch, *words) == 1
    assert "no such folder" in capsys.readouterr().err
