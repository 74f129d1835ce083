from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from legato.cpu import build
from legato.cpu.library import PATH, Library


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PATH.exists():
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    Library(PATH)
    (tmp_path / "model.c").write_text("int other;\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(OSError, match="built from other sources"):
        Library(PATH)


def test_a_library_without_its_sources_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PATH.exists():
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "nowhere")
    assert Library(PATH).instruction_set


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The script that builds the library, with the library and its sources, elsewhere."""
    if not PATH.exists():
        pytest.skip("the CPU kernels are not built: there is no C compiler")
    shutil.copytree(PATH.parent, tmp_path / "cpu")
    return tmp_path / "cpu" / "build.py"


def run(script: Path, **environment: str) -> str:
    """What it says. A build that is not possible is not an error."""
    command = [sys.executable, str(script)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stderr.strip()


def test_a_library_is_built_once(copied: Path) -> None:
    assert run(copied, CC="false").endswith("is up to date")


@pytest.mark.parametrize("stale", ["sources", "machine", "script"])
def test_a_library_that_would_be_refused_is_not_up_to_date(copied: Path, stale: str) -> None:
    library = copied.with_name("legato_cpu.so")
    if stale == "sources":  # of an archive, with the times of the original
        source = copied.parent / "src" / "pool.c"
        source.write_text(source.read_text() + "// changed")
        os.utime(source, (0, 0))
    elif stale == "machine":
        library.write_bytes(b"of another processor")
    else:
        os.utime(library, (0, 0))
    assert "failed; on a CPU the server will use torch's products" in run(copied, CC="false")


@pytest.mark.parametrize("kind", ["broken", "no program"])
def test_a_compiler_that_does_not_work_is_reported(copied: Path, tmp_path: Path, kind: str) -> None:
    copied.with_name("legato_cpu.so").unlink()
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no header files >&2\nexit 1\n" if kind == "broken" else "\0\0\0\0")
    compiler.chmod(0o755)
    said = run(copied, CC=str(compiler))
    assert said.startswith(f"{compiler} failed") and ("no header files" if kind == "broken" else "Exec format") in said
