"""The documents speak of things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_and_commands_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    for file, name in re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", text):
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), (file, name)
    for module in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(targets)


def test_every_fault_has_a_row() -> None:
    rows = re.findall(
        r"^\| (\d+) \|.*\| `(?:tests/|make ).*\|$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE
    )
    assert [int(row) for row in rows] == [*range(1, 7), *range(30, 44), *range(49, 54)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_can_be_parsed(document: Path) -> None:
    text = document.read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        compile(block, document.name, "exec")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert yaml.safe_load(block)


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {name for command in commands for name in re.findall(r"^make ([a-z-]+)", command)}
    assert named <= set(targets)
    stages = re.findall(r"^FROM .* AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images = jobs.get("images", {}).get("strategy", {}).get("matrix", {}).get("include", [])
    assert {image["target"] for image in images} <= set(stages)
