"""benchmarks/beside_vllm.py: both engines get the same work in turn, and figures are compared with their like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.beside_vllm import main, rate, ratio
from benchmarks.processes import BenchmarkFailed
from legato.benchmark.engine.workloads import make_workloads
from legato.modelfiles.shapes import SHAPES

ROOT = Path(__file__).parents[2]
# What the benchmark uses of it. It writes down what it was asked for, and may leave out the last token of each answer.
STAND_IN = """
import json, os
from types import SimpleNamespace

__version__ = "0.0.test"


class SamplingParams:
    def __init__(self, **params):
        self.params = params


class LLM:
    def __init__(self, model, **settings):
        self.config = json.load(open(os.path.join(model, "config.json")))
        self.settings = settings

    def generate(self, prompts, params, use_tqdm):
        with open(os.environ["STAND_IN_LOG"], "a") as log:
            print(json.dumps([self.config, self.settings, prompts, [each.params for each in params]]), file=log)
        lengths = [each.params["max_tokens"] - int(os.environ.get("STAND_IN_LACKS", "0")) for each in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * length)]) for length in lengths]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(STAND_IN)
    return tmp_path / "site"


@pytest.mark.benchmarks
def test_both_get_the_same_work_and_all_of_it_is_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    words = ["--model=tiny", "--workload=G1,G3", "--scale=16", "--repeat=2", f"--vllm-path={path}"]
    words += [f"--out={tmp_path}/new/out.json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.beside_vllm", *words],
        capture_output=True, text=True, timeout=180, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip(" -") for line in done.stdout.splitlines()[:4]] == ["Workload", "", "G1", "G3"]
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert {"date", "command", "legato", "commit", "machine", "ratios"} <= set(written)
    assert "command" not in written["engines"]["legato"], "circumstances are told once"
    engines = written["engines"]
    assert engines["vllm"]["vllm"] == "0.0.test"
    for name in ("G1", "G3"):
        theirs = engines["vllm"]["workloads"][name]
        for engine in ("legato", "legato_again"):
            ours = engines[engine]["workloads"][name]["best"]
            assert (ours["num_in"], ours["num_out"]) == (theirs["best"]["num_in"], theirs["best"]["num_out"])
        assert len(theirs["runs"]) == 2
        assert theirs["best"]["seconds"] == min(run["seconds"] for run in theirs["runs"])

    _, *calls = map(json.loads, (tmp_path / "log").read_text().splitlines())
    config, settings, prompts, params = calls[-1]
    (work,) = make_workloads(["G3"], 16, int(SHAPES["tiny"]["vocab_size"]))
    assert len(calls) == 4, "two runs of two workloads, and the first token before"
    assert config["vocab_size"] == SHAPES["tiny"]["vocab_size"]
    assert settings["enable_prefix_caching"] is False and settings["load_format"] == "dummy"
    assert prompts == [{"prompt_token_ids": prompt} for prompt in work.prompts]
    assert [(each["min_tokens"], each["max_tokens"]) for each in params] == [(new, new) for new in work.new_tokens]


def test_short_answers_are_no_figure(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("STAND_IN_LACKS", "1")
    monkeypatch.setenv("PYTHONPATH", str(path))
    words = ["--model=tiny", "--workload=G1", "--scale=16", f"--json={tmp_path}/out.json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.in_vllm", *words],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "another number of tokens" in done.stderr
    assert not (tmp_path / "out.json").exists()


def fake_python(folder: Path) -> str:
    """One that has no packages at all."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    program.chmod(0o755)
    return str(program)


def best(**rates: tuple[float, float]) -> dict[str, Any]:
    workloads = {
        name: {"best": {"in_per_second": read, "out_per_second": wrote}} for name, (read, wrote) in rates.items()
    }
    return {"first_token_seconds": 1.0, "workloads": workloads}


def test_long_prompts_are_compared_by_what_is_read_and_others_by_what_is_written() -> None:
    figures = {
        "legato": best(G2=(1, 110), G3=(300, 1)),
        "vllm": best(G2=(9, 100), G3=(200, 9)),
        "legato_again": best(G2=(1, 120), G3=(250, 1)),
    }
    assert rate(figures["vllm"], "G2") == 100 and rate(figures["vllm"], "G3") == 200
    assert ratio(figures, "G2") == 1.2 and ratio(figures, "G3") == 1.5


def test_an_engine_that_fails_is_named_and_nothing_is_written(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def benchmark(words: Sequence[str], environment: Mapping[str, str] | None) -> dict[str, Any]:
        if "benchmarks.in_vllm" in words:
            raise BenchmarkFailed("out of memory")
        return best(G1=(1, 1))

    out = tmp_path / "out.json"
    assert main(["--workload=G1", f"--vllm-path={path}", f"--out={out}"], benchmark) == 1
    assert "error: vllm: out of memory" in capsys.readouterr().err
    assert not out.exists()


def test_vllm_is_missed_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where it is installed, nothing is missing.
    monkeypatch.setattr("benchmarks.beside_vllm.sys.executable", fake_python(tmp_path))
    with pytest.raises(SystemExit):
        main([f"--vllm-path={tmp_path}"], lambda words, environment: pytest.fail("nothing may run"))
    assert "--vllm-path" in capsys.readouterr().err.splitlines()[-1]
