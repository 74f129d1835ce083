"""What all engines get to do, and what is made of what their clients saw."""

from __future__ import annotations

import pytest

from legato.benchmark.cpu.comparison import COLUMNS, Comparison, EngineResult
from legato.benchmark.cpu.engines import EngineCommand
from legato.benchmark.cpu.work import WORKLOADS, CpuFigures, chosen
from legato.benchmark.serve.client import Record
from legato.common.errors import OptionError

VOCABULARY = range(100, 200)


def test_prompts_have_their_length_and_share_what_they_should() -> None:
    workload = WORKLOADS["W4"]
    prompts = workload.prompts(VOCABULARY, seed=1)
    assert {len(prompt) for prompt in prompts} == {800}
    assert len({tuple(prompt[:768]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 32


def test_another_run_finds_nothing_of_the_last_in_a_prefix_cache() -> None:
    for workload in WORKLOADS.values():
        first, second = (workload.prompts(VOCABULARY, seed) for seed in (1, 2))
        assert not {tuple(each[:16]) for each in first} & {tuple(each[:16]) for each in second}


def test_scaled_workloads_keep_their_streams() -> None:
    (workload,) = chosen(["W2"], scale=16)
    assert (workload.streams, workload.num_requests, workload.prompt_len, workload.new_tokens) == (16, 4, 8, 8)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(OptionError, match="--workload W9: it must be one of W1, W2, W3, W4, W5"):
        chosen(["W9"], 1)


def test_figures_are_those_of_the_requests() -> None:
    records = [
        Record(0.0, 0.0, 1.0, ttft=0.1, num_tokens=3, gaps=[0.01, 0.03]),
        Record(0.0, 0.0, 1.0, ttft=0.3, num_tokens=3, gaps=[0.02, 0.06]),
    ]
    figures = CpuFigures.of(WORKLOADS["W1"], records, 2.0)
    assert figures.token_ms == pytest.approx(30.0)
    assert figures.first_token_ms == pytest.approx(200.0)
    assert figures.out_per_second == 3.0
    assert figures.in_per_second == pytest.approx(640.0)


def result(token_ms: float, out_per_second: float) -> EngineResult:
    figures = CpuFigures(1.0, token_ms, 100.0, out_per_second, 500.0, 128)
    worse = CpuFigures(2.0, token_ms * 2, 200.0, out_per_second / 2, 250.0, 128)
    return EngineResult(EngineCommand([]), 3.0, 5 * 10**8, 6 * 10**8, {"W1": [worse, figures], "W2": [figures, worse]})


def test_ratios_are_to_the_best_of_the_others_and_above_one_where_we_are_faster() -> None:
    found = Comparison({"legato": result(5.0, 100.0), "slow": result(20.0, 50.0), "fast": result(8.0, 400.0)})
    by_title = {column.title: found.ratio(column) for column in COLUMNS}
    assert by_title["W1 ms per token"] == ("fast", pytest.approx(1.6))
    assert by_title["W2 tok/s"] == ("fast", pytest.approx(0.25))
    assert by_title["W3 prompt tok/s"] is None
    cells = [cell.strip() for cell in found.table().splitlines()[2].split("|")[1:-1]]
    assert cells == ["W1 ms per token", "5.00", "20.00", "8.00", "1.60 fast"]
    assert found.to_json()["ratios"]["W1 ms per token"] == {"best_peer": "fast", "times_as_fast": pytest.approx(1.6)}


def test_a_time_of_zero_is_not_compared() -> None:
    """A fake shard's tokens may all come in one read."""
    found = Comparison({"legato": result(0.0, 100.0), "fast": result(8.0, 400.0)})
    assert found.ratio(COLUMNS[0]) is None
    assert "W1 ms per token" not in found.to_json()["ratios"]
    cells = [cell.strip() for cell in found.table().splitlines()[2].split("|")[1:-1]]
    assert cells == ["W1 ms per token", "-", "8.00", ""]
