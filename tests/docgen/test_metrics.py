"""docs/metrics.md and dashboards/legato.json are fresh and have every metric."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from legato.cli import legato
from legato.common.program import run_program
from legato.docgen.metrics import dashboard, reference_page
from legato.telemetry.catalogue import ALL
from legato.telemetry.route_catalogue import ROUTE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("path", "words"), [("docs/metrics.md", ["metrics"]), ("dashboards/legato.json", ["metrics", "--dashboard"])]
)
def test_the_files_are_fresh(path: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(legato, words) == 0
    assert capsys.readouterr().out == (ROOT / path).read_text(), "run: make docs"


def test_the_page_has_a_row_for_every_metric() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \| (?:counter|gauge|histogram) \|", reference_page(), re.MULTILINE)
    assert rows == [*ALL, *ROUTE]


def test_the_dashboard_shows_every_metric_with_a_title_and_no_other() -> None:
    document = json.loads(dashboard())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    asked = {re.sub("_bucket$", "", name) for panel in panels for name in names(panel)}
    assert asked == {name for name, metric in ALL.items() if metric.title}
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]}
    assert len(places) == len(document["panels"])


def names(panel: dict[str, list[dict[str, str]]]) -> set[str]:
    return {name for target in panel["targets"] for name in re.findall(r"(?:tgi|legato)_\w+", target["expr"])}
