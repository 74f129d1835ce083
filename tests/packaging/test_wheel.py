"""The wheel in an environment that has nothing else: `make test-wheel`."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from legato.common.sockets import free_port
from tests.packaging.conftest import end, generate, until_healthy

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
DIST = Path(os.environ.get("LEGATO_DIST", ROOT / "dist"))
PROGRAMS = ("text-generation-launcher", "text-generation-router", "text-generation-server", "legato")


def newest(pattern: str) -> Path:
    return max(DIST.glob(pattern), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of a new environment in which only the wheel was installed."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", newest("legato-*.whl")], check=True)
    return folder / "bin"


def test_the_archives_have_what_they_need_and_nothing_of_this_machine() -> None:
    with zipfile.ZipFile(newest("legato-*.whl")) as wheel:
        names = set(wheel.namelist())
    assert {"legato/launcher/cli.py", "legato/pb/generate_v1_pb2.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    pages = {f"legato/{path.relative_to(ROOT / 'legato')}" for path in (ROOT / "legato").rglob("*") if path.is_file()}
    data = {name for name in pages if not name.endswith((".pyc", ".py", ".pyi"))}
    assert data <= names, "a file that a module reads is missing from the wheel"
    with tarfile.open(newest("legato-*.tar.gz")) as source:
        paths = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "proto/generate.proto", "Makefile", "LICENSE"} <= paths
    assert not [path for path in paths if path.startswith((".venv", "dist", ".git/"))]


def test_every_program_starts(programs: Path, tmp_path: Path) -> None:
    for program in PROGRAMS:
        words = [programs / program, "--version"]
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert said.startswith(program)


def test_the_installed_server_serves(programs: Path, model: Path, tmp_path: Path) -> None:
    port = free_port()
    words = ["--model-id", str(model), "--hostname", "127.0.0.1", "--port", str(port), "--prometheus-port", "0"]
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = subprocess.Popen([programs / "text-generation-launcher", *words], cwd=tmp_path, env=environ)
    try:
        until_healthy(process, port)
        assert generate(port)["details"]["generated_tokens"] == 5
    finally:
        assert end(process) == 0


def test_the_doctor_finds_this_machine_fit(programs: Path, model: Path, tmp_path: Path) -> None:
    words = [programs / "legato", "doctor", str(model), "--port", str(free_port()), "--prometheus-port", "0"]
    said = subprocess.run([*words, "--master-port", str(free_port())], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
