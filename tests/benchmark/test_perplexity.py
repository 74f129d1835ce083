"""benchmarks/perplexity.py: what it makes of losses, and the table of docs/quantization.md."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.perplexity import MOST_PERCENT, Measurements, compared, main, report, table
from legato.quantization.on_load import QUANTIZERS

ROOT = Path(__file__).parents[2]
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
RESULTS = [ROOT / "benchmarks/results" / f"perplexity-{name}.json" for name in MODELS]


def row(percent: float) -> dict[str, Any]:
    return {"perplexity": 10.0, "percent_above_dense": percent, "standard_error_percent": 0.1}


def test_losses_are_compared_token_by_token() -> None:
    found = compared([1.0 + math.log(1.01), 3.0 + math.log(1.03)], [1.0, 3.0])
    assert found["percent_above_dense"] == pytest.approx(100 * (math.sqrt(1.01 * 1.03) - 1))
    assert found["standard_error_percent"] == pytest.approx(100 * (math.log(1.03) - math.log(1.01)) / 2)


@pytest.mark.parametrize("name", MOST_PERCENT)
def test_a_method_beyond_its_limit_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dense = {"dense": {"perplexity": 9.9}}
    assert report({**dense, name: row(MOST_PERCENT[name] - 0.01)}) == 0
    assert report({**dense, name: row(MOST_PERCENT[name] + 0.01)}) == 1
    assert f"{name} is {MOST_PERCENT[name] + 0.01:.2f} % above dense weights" in capsys.readouterr().out


def test_rows_of_another_text_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"model": "m", "text_sha256": "a", "methods": {"fp8": row(1)}}))
    assert Measurements(file, {"model": "m", "text_sha256": "a"}).methods.keys() == {"fp8"}
    assert Measurements(file, {"model": "m", "text_sha256": "b"}).methods == {}


def test_the_documentation_has_the_measured_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in RESULTS:
        assert json.loads(file.read_text())["methods"].keys() <= {"dense", "gptq", *QUANTIZERS}
    assert table(RESULTS) in (ROOT / "docs/quantization.md").read_text()
    monkeypatch.setattr("sys.argv", ["perplexity", "--table", *map(str, RESULTS)])
    assert main() == 0 and capsys.readouterr().out == table(RESULTS) + "\n"
