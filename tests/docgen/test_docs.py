"""The documents speak of things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legato.common.option import table
from legato.common.options import PROGRAMS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        assert "://" in link or (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_rectangular(document: Path) -> None:
    for lines in re.findall(r"(?:^\|.*\n)+", document.read_text(), re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}
        assert len(widths) == 1, lines


def test_options_that_are_compared_with_tgis_exist() -> None:
    known = {option.flag for program in PROGRAMS.values() for option in table(program)}
    named = set(re.findall(r"`--([a-z-]+)", (ROOT / "docs" / "compatibility.md").read_text()))
    assert named and named <= known


def test_targets_of_the_makefile_are_in_the_table_of_contributing() -> None:
    """And nothing else is."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(listed) == set(phony[1].split()) - {"help"}
