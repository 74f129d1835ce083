"""benchmarks/vision.py: both engines get the same chats with pictures, and figures are compared with their like."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

from PIL import Image

from benchmarks.vision import is_same_work, main, ratios
from benchmarks.vision_work import Answered, chats, figures

ROOT = Path(__file__).parents[2]
SIDE, NEW, COUNT = 112, 5, 3
# What the benchmark uses of vLLM: a picture has 16 tokens at this size.
STAND_IN = """
import json, os, time
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
        return [self.answer(prompt, params.params) for prompt in prompts]

    def answer(self, prompt, params):
        picture, ids = prompt["multi_modal_data"]["image"], prompt["prompt_token_ids"]
        assert ids.count(self.config["image_token_id"]) == 1 and self.settings["load_format"] == "dummy"
        with open(os.environ["STAND_IN_LOG"], "a") as log:
            print(json.dumps(picture.getpixel((50, 50))), file=log)
        length = params["max_tokens"] - int(os.environ.get("STAND_IN_LACKS", "0"))
        outputs, metrics = [SimpleNamespace(token_ids=[1] * length)], SimpleNamespace(first_token_ts=time.monotonic())
        return SimpleNamespace(prompt_token_ids=ids + [0] * 15, outputs=outputs, metrics=metrics)
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
        env=os.environ | variables,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(STAND_IN)
    return tmp_path / "site"


def test_both_get_the_same_work(path: Path, tmp_path: Path) -> None:
    log, words = tmp_path / "log", ["--model=tiny-vl", f"--requests={COUNT}", f"--side={SIDE}", f"--new={NEW}"]
    found = []
    for program, variables in (("over_http", {}), ("in_vllm", {"STAND_IN_LOG": str(log), "PYTHONPATH": str(path)})):
        file = tmp_path / f"{program}.json"
        done = run(f"benchmarks.vision_{program}", *words, "--repeat=2", f"--json={file}", **variables)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(file.read_text()))
    assert is_same_work({"legato": found[0], "vllm": found[1]})
    for measured in found:
        assert [run["num_out"] for run in measured["runs"]] == [COUNT * NEW] * 2
        assert measured["best"]["seconds"] == min(run["seconds"] for run in measured["runs"])
    sent = [chat for number in (1, 2) for chat in chats(COUNT, SIDE, number)]
    pixels = [list(Image.open(io.BytesIO(chat.data)).getpixel((50, 50))) for chat in sent]  # type: ignore[call-overload]
    _, *seen = map(json.loads, log.read_text().splitlines())
    assert seen == pixels and len(set(map(tuple, pixels))) == len(pixels)


def test_short_answers_are_no_figure(path: Path, tmp_path: Path) -> None:
    words = [
        "--model=tiny-vl",
        "--requests=1",
        f"--side={SIDE}",
        "--new=3",
        "--repeat=1",
        f"--json={tmp_path}/out.json",
    ]
    variables = {"STAND_IN_LOG": str(tmp_path / "log"), "STAND_IN_LACKS": "1", "PYTHONPATH": str(path)}
    done = run("benchmarks.vision_in_vllm", *words, **variables)
    assert done.returncode != 0 and not (tmp_path / "out.json").exists()


def test_figures_of_a_run() -> None:
    answers = [Answered(0.1, 1.0, 20, 4), Answered(0.3, 2.0, 30, 4)]
    found = figures(answers, 4)
    assert (found["seconds"], found["out_per_second"], found["num_in"]) == (2.0, 4.0, 50)
    assert found["ttft_ms"]["p50"] == pytest.approx(200.0)
    with pytest.raises(AssertionError, match="instead of 5"):
        figures(answers, 5)


def measured(rate: float, ttft: float, num_in: int = 10) -> dict[str, Any]:
    run = {
        "seconds": 1.0,
        "num_in": num_in,
        "num_out": 5,
        "out_per_second": rate,
        "ttft_ms": {"p50": ttft, "p95": ttft},
    }
    return {"first_token_seconds": 1.0, "best": run, "runs": [run]}


def test_above_one_legato_is_better() -> None:
    found = {"legato": measured(110, 30), "vllm": measured(100, 40), "legato_again": measured(120, 50)}
    assert ratios(found) == {"out_per_second": pytest.approx(1.2), "ttft_p50": pytest.approx(4 / 3)}


@pytest.mark.parametrize(("num_in", "code"), [(10, 0), (11, 1)])
def test_other_work_is_an_error(path: Path, num_in: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def benchmark(words: Sequence[str], environment: Mapping[str, str] | None) -> dict[str, Any]:
        return measured(1.0, 1.0, num_in if "benchmarks.vision_in_vllm" in words else 10)

    out = path / "new" / "out.json"
    assert main([f"--vllm-path={path}", f"--out={out}"], benchmark) == code
    written = json.loads(out.read_text())
    assert set(written["engines"]) == {"legato", "vllm", "legato_again"} and written["ratios"]
    assert ("other numbers of tokens" in capsys.readouterr().err) == bool(code)
