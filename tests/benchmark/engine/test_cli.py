"""The conversation of `legato bench engine` with a shard."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from legato.benchmark.engine.cli import EngineResults, benchmark, summary, to_json
from legato.benchmark.options import EngineOptions
from legato.benchmark.shard import ShardFailed, running
from legato.common.errors import OptionError
from tests.benchmark.fake_shard import BLOCK_SIZE, FakeService, listening

SMALL = dict(max_rows=8, max_total_tokens=64, step_tokens=32)


def measure(service: FakeService, options: EngineOptions, names: list[str]) -> EngineResults:
    async def conversation() -> EngineResults:
        async with listening(service):
            return await benchmark(options, names, running(service.path), started=0.0)

    return asyncio.run(conversation())


def custom(requests: int, prompt: int, new: int, repeat: int = 1) -> EngineOptions:
    return EngineOptions(requests=requests, prompt=prompt, new=new, repeat=repeat, **SMALL)


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(f"{tmp_path}/shard-0")


def test_every_token_is_counted(service: FakeService) -> None:
    (result,) = measure(service, custom(4, prompt=6, new=5), []).workloads
    assert (result.best.num_in, result.best.num_out) == (24, 20)
    assert result.best.out_per_second == pytest.approx(20 / result.best.seconds)


def test_a_step_gives_every_request_a_token(service: FakeService) -> None:
    (result,) = measure(service, custom(4, prompt=6, new=5), []).workloads
    assert result.best.num_steps == 5
    assert result.best.ms_per_step == pytest.approx(result.best.seconds * 1e3 / 5)
    assert result.best.step.average == pytest.approx(result.best.ms_per_step)


def test_the_first_token_comes_before_the_last(service: FakeService) -> None:
    (result,) = measure(service, custom(4, prompt=6, new=5), []).workloads
    assert 0 < result.best.ttft.lowest <= result.best.ttft.highest < result.best.seconds * 1e3


def test_all_repetitions_go_through_one_stream_and_none_profits_from_another(service: FakeService) -> None:
    (result,) = measure(service, custom(2, prompt=40, new=2, repeat=3), []).workloads
    assert service.num_streams == 1
    assert [figures.num_cached for figures in result.runs] == [0, 0, 0]
    assert len({figures.num_steps for figures in result.runs}) == 1


def test_the_best_run_is_the_fastest(service: FakeService) -> None:
    (result,) = measure(service, custom(2, prompt=8, new=4, repeat=3), []).workloads
    assert result.best.seconds == min(figures.seconds for figures in result.runs)


def test_the_cache_has_room_for_the_largest_workload(service: FakeService) -> None:
    measure(service, custom(8, prompt=30, new=2), [])
    (warmup,) = service.of("Warmup")
    assert (warmup.max_rows, warmup.max_total_tokens, warmup.max_prefill_tokens) == (8, 64, 32)
    assert warmup.max_batch_total_tokens == 8 * (8 + 1) * BLOCK_SIZE


def test_requests_with_a_common_prefix_find_it_in_the_cache(service: FakeService) -> None:
    # 2 requests of 64 common tokens and 2 of their own. The second waits until the first has computed the prefix.
    options = EngineOptions(scale=32, repeat=1, max_rows=8, max_total_tokens=80, step_tokens=8)
    results = measure(service, options, ["prefix"])
    prefix, parts = results.workloads
    assert prefix.best.num_cached == 64
    assert parts.best.num_cached == 0
    assert results.ratio(prefix) == pytest.approx(prefix.best.seconds / parts.best.seconds)
    assert results.ratio(parts) is None


def test_a_step_that_fails_ends_the_benchmark_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ShardFailed, match="out of paper"):
        measure(FakeService(f"{tmp_path}/shard-0", fail_at_step=3), custom(2, prompt=4, new=8), [])


def test_work_that_the_shard_cannot_take_is_refused_with_a_cure(service: FakeService) -> None:
    with pytest.raises(OptionError, match=r"custom has a request of 104 tokens .* 64: raise --max-total-tokens"):
        measure(service, custom(1, prompt=100, new=4), [])


def test_the_summary_has_a_line_for_each_workload_and_the_ratio(service: FakeService) -> None:
    results = measure(service, EngineOptions(scale=64, repeat=1, **SMALL), ["G1", "prefix"])
    text = summary(results)
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:5]] == ["G1", "prefix", "prefix, its parts"]
    assert "Ready after" in text and "times the time of its parts" in text


def test_the_json_holds_every_run_and_the_circumstances(service: FakeService) -> None:
    options = EngineOptions(scale=64, repeat=2, **SMALL)
    results = measure(service, options, ["G1", "G2"])
    data = json.loads(json.dumps(to_json({"commit": {"id": "abc"}}, options, results)))
    assert data["commit"]["id"] == "abc"
    assert data["shard"]["max_step_tokens"] == 32
    assert list(data["workloads"]) == ["G1", "G2"]
    runs = data["workloads"]["G2"]["runs"]
    assert len(runs) == 2 and data["workloads"]["G2"]["best"] in runs
    assert {"out_per_second", "in_per_second", "ms_per_step", "ttft_ms", "step_ms", "num_steps"} <= runs[0].keys()
    assert data["first_token_seconds"] >= data["ready_seconds"]
