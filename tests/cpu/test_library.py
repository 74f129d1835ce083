from __future__ import annotations

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
