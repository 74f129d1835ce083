"""benchmarks/floors.py: what a token reads is counted right, and a shape that fails does not affect the others."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.floors import BenchmarkFailed, Figures, Floor, main, num_active, run_benchmark
from legato.modelfiles.shapes import SHAPES
from legato.plan.counting import CountedModel
from tests.models.tiny_experts import tiny_mixtral
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]


def sizes(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def measured(num_in: int, num_out: int, rate: float, step_ms: float) -> dict[str, Any]:
    """The file of `legato bench engine`, as far as it is read."""
    best = {"num_in": num_in, "num_out": num_out, "out_per_second": rate, "step_ms": {"p50": step_ms}}
    return {
        "shard": {"dtype": "torch.bfloat16", "device": "cuda"},
        "workloads": {"G1": {"best": best, "runs": [best, {"out_per_second": rate / 2}]}},
    }


def test_a_token_reads_everything_but_the_embedding(tmp_path: Path) -> None:
    stored = sizes(tiny_llama(tmp_path))
    assert num_active(config_of(tmp_path)) == sum(stored.values()) - stored["model.embed_tokens.weight"]


def test_an_embedding_that_is_the_head_is_read() -> None:
    numbers = CountedModel(SHAPES["llama-1b"], "float16").numbers
    assert "lm_head.weight" not in numbers and num_active(SHAPES["llama-1b"]) == sum(numbers.values())


def test_a_token_reads_the_whole_router_and_the_experts_that_it_chooses(tmp_path: Path) -> None:
    stored = sizes(tiny_mixtral(tmp_path))
    read = [size for name, size in stored.items() if not any(f".experts.{number}." in name for number in (2, 3, 4))]
    assert num_active(config_of(tmp_path)) == sum(read) - stored["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 7.50), ("qwen3-8b", 7.57), ("falcon-7b", 6.92), ("starcoder-15b", 15.52), ("mixtral-8x7b", 12.75)],
)
def test_the_active_parameters_of_the_shapes_are_right_within_a_percent(name: str, billions: float) -> None:
    assert num_active(SHAPES[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_floor_is_the_bandwidth_over_weights_and_cache() -> None:
    floor = Floor.of(SHAPES["llama-8b"], "bfloat16", 191.5, bandwidth=4.3)
    assert floor.weight_bytes == 2 * num_active(SHAPES["llama-8b"])
    assert floor.kv_bytes == 191.5 * 32 * 2 * 8 * 128 * 2
    assert floor.tokens_per_second == pytest.approx(4.3e12 / (15.01e9 + 25.1e6), rel=1e-3)


def test_shares_are_those_of_the_whole_run_and_of_the_median_step() -> None:
    figures = Figures.of(SHAPES["llama-8b"], measured(128, 128, 200.0, 4.0), bandwidth=4.3)
    assert figures.floor == Floor.of(SHAPES["llama-8b"], "bfloat16", 128 + 127 / 2, 4.3)
    assert figures.share == 200.0 / figures.floor.tokens_per_second
    assert figures.step_share == 250.0 / figures.floor.tokens_per_second
    assert figures.all_tokens_per_second == [200.0, 100.0]


@pytest.mark.benchmarks
def test_a_shape_is_measured_and_written_with_its_environment(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.floors", "--model=tiny", "--repeat=2", f"--out={tmp_path}/new/out.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "the fastest of 2 runs" in done.stderr, "the progress of the benchmark"
    assert [line.split("|")[1].strip(" -") for line in done.stdout.splitlines()] == ["Shape", "", "tiny"]
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert {"date", "command", "commit", "machine"} <= set(written)
    figures = written["shapes"]["tiny"]
    assert figures["floor"]["weight_bytes"] == num_active(SHAPES["tiny"]) * 4, "in float32, being on a CPU"
    assert figures["tokens_per_second"] == max(figures["all_tokens_per_second"])
    assert len(figures["all_tokens_per_second"]) == 2
    assert 0 < figures["share"] < 1 and 0 < figures["step_share"] < 1


def test_a_benchmark_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchmarkFailed, match=r"the shard ended with code 1(?s:.*)'/nowhere': no such folder"):
        run_benchmark("/nowhere", 1)


def test_a_shape_that_fails_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def benchmark(name: str, repeat: int) -> dict[str, Any]:
        if name == "mixtral-8x7b":
            raise BenchmarkFailed("out of memory")
        return measured(128, 128, 100.0, 8.0)

    out = tmp_path / "out.json"
    assert main(["--model=llama-8b,mixtral-8x7b,tiny", f"--out={out}"], benchmark) == 1
    printed = capsys.readouterr()
    assert [line.split()[1] for line in printed.out.splitlines()[2:]] == ["llama-8b", "mixtral-8x7b", "tiny"]
    assert "error: mixtral-8x7b: out of memory" in printed.err
    shapes = json.loads(out.read_text())["shapes"]
    assert shapes["mixtral-8x7b"] == {"error": "out of memory"}
    assert shapes["llama-8b"]["tokens_per_second"] == shapes["tiny"]["tokens_per_second"] == 100.0


def test_an_unknown_shape_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model=tiny,huge"], lambda name, repeat: pytest.fail("nothing may run"))
    assert "'huge' must be one of llama-8b" in capsys.readouterr().err
