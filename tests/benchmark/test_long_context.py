"""benchmarks/long_context.py: which prompts are computed again and which are remembered, and what figures mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.long_cases import CASES, chosen, collected, runs
from benchmarks.long_context import ratio, table
from legato.benchmark.engine.workloads import Scale
from tests.benchmark.test_beside_vllm import ROOT, STAND_IN

SCALE = Scale(64, 512)


def test_prompts_are_new_in_every_run_but_of_decodes_over_a_context() -> None:
    for case in CASES:
        prompts = [workload.prompts for workload in runs(case, SCALE)]
        assert len(prompts) == (1 + 2 * case.repeat if case.figure == "step_ms" else case.repeat)
        is_remembered = all(each == prompts[0] for each in prompts)
        assert is_remembered == (case.figure == "step_ms")


def test_a_step_is_what_further_tokens_take() -> None:
    (case,) = chosen("16 x")
    found = collected(case, [20.0, 0.5, 0.5 + 0.02 * case.new, 0.6, 0.6 + 0.03 * case.new], SCALE)
    assert found["runs"] == pytest.approx([20.0, 30.0]) and found["step_ms"] == pytest.approx(20.0)


def test_more_is_better_of_rates_and_less_of_times() -> None:
    cases = chosen("8 x 32;2 x")
    ours, theirs = (
        {
            "first_token_cold_seconds": 20.0,
            "first_token_seconds": 8.0,
            "workloads": {case.name: collected(case, [seconds], Scale(1, 512)) for case in cases},
        }
        for seconds in (10.0, 11.0)
    )
    assert [ratio(ours, theirs, case) for case in cases] == ["1.100", "1.100"]
    assert "20.0 / 8.0 s" in table(ours, None, cases)


@pytest.mark.benchmarks
def test_vllm_gets_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    words = ["--model=tiny", "--scale=64", "--long=", f"--json={tmp_path}/out.json"]
    subprocess.run([sys.executable, "-m", "benchmarks.in_vllm", *words], check=True, timeout=60, cwd=ROOT)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert list(figures["workloads"]) == [case.name for case in CASES]
    _, *calls = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert len(calls) == sum(1 for case in CASES for _ in runs(case, SCALE))
    assert all(settings["enable_prefix_caching"] for _, settings, _, _ in calls)
