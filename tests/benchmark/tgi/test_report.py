"""What the benchmark prints and writes, for measurements that are known."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.benchmark.chart import Curve, axis_ticks, line_chart
from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.tables import markdown
from legato.benchmark.tgi.page import page
from legato.benchmark.tgi.report import parameters, tables, to_json
from legato.benchmark.tgi.unary import Measured

AROUND = {"date": "2026-01-31", "command": "bench <x>", "legato": "1", "machine": {"cpu": "Z80", "gpus": ["a", "b"]}}


def measured(batch_size: int, prefills: list[float], decodes: list[list[float]]) -> Measured:
    result = Measured(batch_size, sequence_length=10)
    for prefill, steps in zip(prefills, decodes, strict=True):
        result.add(prefill, steps)
    return result


@pytest.fixture
def results() -> list[Measured]:
    return [measured(1, [0.1, 0.3], [[0.01, 0.03], [0.02, 0.02]]), measured(4, [0.5], [[0.05, 0.05]])]


def test_every_decode_step_counts_for_the_latency_of_a_token(results: list[Measured]) -> None:
    latency = results[0].latency("Decode (token)")
    assert latency is not None
    assert (latency.average, latency.lowest, latency.highest) == pytest.approx((20, 10, 30))


def test_the_total_is_that_of_a_run(results: list[Measured]) -> None:
    assert results[0].latencies["Decode (total)"] == pytest.approx([40, 40])


def test_throughput_counts_the_tokens_of_all_requests(results: list[Measured]) -> None:
    assert results[1].throughputs == {"Prefill": [pytest.approx(80)], "Decode": [pytest.approx(80)]}


def test_the_three_tables_are_those_of_tgi(results: list[Measured]) -> None:
    asked, latency, throughput = tables(parameters(BenchmarkOptions(top_k=5), "tiny"), results).split("\n\n")
    assert asked.splitlines()[0] == "| Parameter          | Value |"
    assert "| Top K              | 5     |" in asked
    assert "| Watermark          | false |" in asked
    assert [line.split("|")[1].strip() for line in latency.splitlines()[2:]] == [
        "Prefill", "", "Decode (token)", "", "Decode (total)", "",
    ]  # fmt: skip
    assert re.search(r"Prefill +\| +1 \| 200.00 ms \| 100.00 ms \| 300.00 ms \| 200.00 ms \| 280.00 ms", latency)
    assert re.search(r"Decode +\| +1 \| 50.00 tokens/secs \| 50.00 tokens/secs \| +50.00 tokens/secs", throughput)


def test_a_generation_of_one_token_has_no_decode() -> None:
    alone = measured(1, [0.1], [[]])
    text = tables({"Model": "tiny"}, [alone])
    assert re.search(r"Decode \(token\) +\| +1 \| +- \| +- \|", text)
    assert to_json({}, {}, {}, [alone])["results"][0]["latency_ms"]["Decode (token)"] is None


def test_the_json_holds_summaries_and_every_value(results: list[Measured]) -> None:
    data = json.loads(json.dumps(to_json(AROUND, {"device": "cpu"}, {"Model": "tiny"}, results)))
    assert data["machine"]["cpu"] == "Z80"
    first = data["results"][0]
    assert first["batch_size"] == 1
    assert first["latency_ms"]["Prefill"]["p50"] == pytest.approx(200)
    assert first["latency_ms"]["Decode (token)"]["values"] == pytest.approx([10, 30, 20, 20])
    assert first["throughput_tokens_per_second"]["Decode"]["average"] == pytest.approx(50)


def test_markdown_columns_line_up() -> None:
    lines = markdown(("Name", "N"), [("a", "1"), ("longer", "100")]).splitlines()
    assert lines == ["| Name   |   N |", "| ------ | --: |", "| a      |   1 |", "| longer | 100 |"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_fetches_nothing(results: list[Measured]) -> None:
    text = page(AROUND, parameters(BenchmarkOptions(), "tiny"), results)
    parser = Tags()
    parser.feed(text)
    assert not {tag for tag, _ in parser.seen} & {"script", "link", "img", "iframe"}
    assert not any("src" in attrs or "href" in attrs for _, attrs in parser.seen)
    assert "url(" not in text and "@import" not in text


def test_the_page_has_a_curve_for_everything_that_was_measured(results: list[Measured]) -> None:
    text = page(AROUND, parameters(BenchmarkOptions(), "tiny"), results)
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(charts) == 4
    for chart in charts:
        lines = chart.findall(".//polyline")
        assert lines and all(len(line.attrib["points"].split()) == len(results) for line in lines)


def test_names_cannot_break_the_page(results: list[Measured]) -> None:
    text = page(AROUND, parameters(BenchmarkOptions(), "<b>&"), results)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text
    assert "bench &lt;x&gt;" in text


def test_a_value_that_is_missing_leaves_a_gap() -> None:
    chart = ElementTree.fromstring(line_chart("t", "x", ["1", "2", "3"], [Curve("c", [1.0, None, 3.0])]))
    assert len(chart.findall(".//circle")) == 2


def test_a_higher_value_is_drawn_higher() -> None:
    chart = ElementTree.fromstring(line_chart("t", "x", ["1", "2"], [Curve("c", [1.0, 3.0])]))
    low, high = (float(circle.attrib["cy"]) for circle in chart.findall(".//circle"))
    assert high < low


@given(st.floats(1e-6, 1e9))
def test_the_axis_reaches_from_zero_to_the_highest_value(highest: float) -> None:
    ticks = axis_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * (1 - 1e-6)
    assert 3 <= len(ticks) <= 7
