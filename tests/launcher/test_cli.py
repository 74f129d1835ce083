"""The launcher's command without children, the legato command, and the reference page."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from legato import __version__
from legato.cli import legato, router
from legato.common.program import run_program
from legato.docgen.options import reference_page

HEAVY = {"torch", "grpc", "huggingface_hub", "numpy", "transformers", "rich", "starlette", "uvicorn"}


@pytest.mark.parametrize("module", ["legato.launcher.cli", "legato.cli", "legato.common.program"])
def test_importing_does_not_import_heavy_modules(module: str) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "launcher.md"
    assert page.read_text() == reference_page(), "run: legato options > docs/launcher.md"


def test_legato_options_prints_the_reference_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["options"]) == 0
    assert capsys.readouterr().out == reference_page()


def test_legato_serve_is_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["serve", "--ngrok"]) == 1
    assert capsys.readouterr().err.startswith("error: --ngrok: ")


def test_legato_env_names_versions_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["env"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["legato"] == __version__
    assert lines["torch"][0].isdigit()
    assert int(lines["cpus"]) >= 1


@pytest.mark.parametrize("arguments", [["print-schema"], ["--port", "8080", "print-schema"]])
def test_the_router_prints_the_openapi_document_without_a_model(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["text-generation-router", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        router()
    assert not exit_info.value.code
    assert "/v1/chat/completions" in json.loads(capsys.readouterr().out)["paths"]


@pytest.mark.parametrize("flag", ["--version", "-V"])
@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("legato", "legato.cli"),
        ("text-generation-launcher", "legato.launcher.cli"),
        ("text-generation-router", "legato.router.cli"),
        ("text-generation-server", "legato.server.cli"),
        ("text-generation-benchmark", "legato.benchmark.tgi.cli"),
    ],
)
def test_every_program_prints_its_version(
    program: str, module: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [program, flag])
    with pytest.raises(SystemExit) as exit_info:
        import_module(module).main()
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"{program} {__version__}\n"


def test_an_unknown_subcommand_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["nonsense"]) == 2
