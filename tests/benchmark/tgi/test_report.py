"""What the benchmark prints and writes, for measurements that are known."""

from __future__ import annotations

import json
import re

import pytest

from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.report import Summary
from legato.benchmark.tgi.cli import describe, parameters, tables, to_json
from legato.benchmark.tgi.unary import BatchResult
from legato.pb import generate_pb2 as pb

AROUND = {"date": "2026-01-31", "command": "bench <x>", "legato": "1", "machine": {"cpu": "Z80", "gpus": ["a", "b"]}}


def measured(batch_size: int, prefills: list[float], decodes: list[list[float]]) -> BatchResult:
    result = BatchResult(batch_size, sequence_length=10)
    for prefill, steps in zip(prefills, decodes, strict=True):
        result.add(prefill, steps)
    return result


@pytest.fixture
def results() -> list[BatchResult]:
    return [measured(1, [0.1, 0.3], [[0.01, 0.03], [0.02, 0.02]]), measured(4, [0.5], [[0.05, 0.05]])]


def test_every_decode_step_counts_for_the_latency_of_a_token(results: list[BatchResult]) -> None:
    latency = Summary.of(results[0].latencies["Decode (token)"])
    assert latency is not None
    assert (latency.average, latency.lowest, latency.highest) == pytest.approx((20, 10, 30))


def test_the_total_is_that_of_a_run(results: list[BatchResult]) -> None:
    assert results[0].latencies["Decode (total)"] == pytest.approx([40, 40])


def test_throughput_counts_the_tokens_of_all_requests(results: list[BatchResult]) -> None:
    assert results[1].throughputs == {"Prefill": [pytest.approx(80)], "Decode": [pytest.approx(80)]}


def test_the_three_tables_are_those_of_tgi(results: list[BatchResult]) -> None:
    asked, latency, throughput = tables(parameters(BenchmarkOptions(top_k=5, spawn="tiny")), results).split("\n\n")
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
    assert to_json({}, pb.InfoResponse(), {}, [alone])["results"][0]["latency_ms"]["Decode (token)"] is None


def test_the_json_holds_summaries_and_every_value(results: list[BatchResult]) -> None:
    data = json.loads(json.dumps(to_json(AROUND, pb.InfoResponse(device_type="cpu"), {"Model": "tiny"}, results)))
    assert data["machine"]["cpu"] == "Z80" and data["shard"]["device"] == "cpu"
    first = data["results"][0]
    assert first["batch_size"] == 1
    assert first["latency_ms"]["Prefill"]["p50"] == pytest.approx(200)
    assert first["latency_ms"]["Decode (token)"]["values"] == pytest.approx([10, 30, 20, 20])
    assert first["throughput_tokens_per_second"]["Decode"]["average"] == pytest.approx(50)


def test_the_parameters_have_the_names_and_the_order_of_tgi() -> None:
    assert list(parameters(BenchmarkOptions())) == [
        "Model", "Sequence Length", "Decode Length", "Top N Tokens", "N Runs", "Warmups", "Temperature", "Top K",
        "Top P", "Typical P", "Repetition Penalty", "Frequency Penalty", "Watermark", "Do Sample",
    ]  # fmt: skip


def test_a_batch_size_in_one_line() -> None:
    result = measured(4, [0.020, 0.040], [[0.005, 0.005], [0.010, 0.010]])
    assert describe(result) == "batch size 4: prefill 30.00 ms, 1,500 tokens/s, decode 7.50 ms/token, 600 tokens/s"
