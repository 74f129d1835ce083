"""docs/api.md: fresh, complete, and without links that lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legato.api.native import GenerateParameters
from legato.cli import legato
from legato.common.program import run_program
from legato.docgen.api import reference_page
from legato.http.operations import OPERATIONS

PAGE = reference_page()


def test_the_page_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "api.md"
    assert page.read_text() == PAGE, "run: make docs"


def test_legato_api_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["api"]) == 0
    assert capsys.readouterr().out == PAGE


def test_every_route_has_a_section_and_a_line_in_the_list() -> None:
    for operation in OPERATIONS:
        title = f"{operation.method.upper()} {operation.path}"
        assert f"\n### {title}\n" in PAGE
        assert f"[`{title}`]" in PAGE


def test_every_link_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors


def test_every_table_is_rectangular() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    assert tables
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_every_parameter_is_listed_with_its_bounds() -> None:
    assert set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) >= set(GenerateParameters.__struct_fields__)
    assert "| `top_p` | number, > 0, <= 1 |" in PAGE


def test_fields_of_answers_say_whether_they_can_be_missing_or_null() -> None:
    assert "| `details` | [Details](#details), or missing |" in PAGE
    assert "| `seed` | integer or null |" in PAGE
    assert "| `token_logprobs` | list of (number or null) |" in PAGE


def test_errors_are_listed_in_the_form_of_each_api() -> None:
    assert '{"error": "Model is overloaded", "error_type": "overloaded"}' in PAGE
    assert '"type": "rate_limit_error"' in PAGE
