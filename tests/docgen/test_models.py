"""docs/models.md is fresh, and its ticks are those of the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.cli import legato
from legato.common.program import run_program
from legato.docgen.models import reference_page
from legato.models.catalogue import CATALOGUE

PAGE = reference_page()


def test_the_page_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text() == PAGE, "run: make docs"


def test_legato_models_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, ["models"]) == 0
    assert capsys.readouterr().out == PAGE


@pytest.mark.parametrize(
    ("model_type", "ticks"),
    [("llama", "✓ | ✓ | ✓ | ✓ | "), ("gpt2", "✓ | ✓ |  |  | "), ("qwen2_vl", "✓ | ✓ |  |  | ✓")],
)
def test_a_row_has_a_tick_for_what_is_tested(model_type: str, ticks: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if f"| `{model_type}` |" in line]
    assert row.endswith(f" | {ticks} |") and CATALOGUE[model_type].name in row
