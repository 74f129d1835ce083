"""The figures in README.md and docs/performance.md are those of the result files: a new result needs a new figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PERFORMANCE = ROOT / "docs" / "performance.md"
Row = tuple[str, list[str]]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells(page: Path, label: str) -> list[str]:
    """Of the one row of the page that begins with the label."""
    [row] = [line for line in page.read_text().splitlines() if line.startswith(f"| {label}")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def beside_vllm() -> tuple[list[list[float]], list[float]]:
    """Legato's and vLLM's best of G1 to G4, and the ratios that the tool wrote."""
    found = result("beside-vllm-h200-llama-8b")
    engines = found["engines"]

    def best(engine: str, workload: str) -> float:
        value: float = engines[engine]["workloads"][workload]["best"][
            "in_per_second" if workload == "G3" else "out_per_second"
        ]
        return value

    workloads = ("G1", "G2", "G3", "G4")
    pairs = [[max(best("legato", each), best("legato_again", each)), best("vllm", each)] for each in workloads]
    return pairs, [found["ratios"][each] for each in workloads]


def on_gpu() -> Iterator[Row]:
    pairs, ratios = beside_vllm()
    forms = {"G1, one": ",.1f", "G2, 256": ",.0f", "G3, 64": ",.0f", "G4, 512": ",.0f"}
    for (label, form), pair, ratio in zip(forms.items(), pairs, ratios, strict=True):
        yield label, [*(format(each, form) for each in pair), f"{ratio:.2f}"]
    runs = result("http-h200-llama-8b")["runs"]
    for streams in (1, 64, 256, 512):
        run = max((run for run in runs if run["concurrency"] == streams), key=lambda run: run["out_tok_s"])
        gap, first = run["gap_ms"], run["ttft_ms"]["p50"]
        p99 = f"{gap['p99']:.{1 if streams == 1 else 0}f}"
        yield f"{streams} |", [f"{run['out_tok_s']:,.0f}", f"{first:.0f} ms", f"{gap['p50']:.1f} / {p99} ms"]
    vision = [result("vision-h200-qwen2.5-vl-7b")["engines"][engine]["best"] for engine in ("legato", "vllm")]
    speeds = " / ".join(f"{best['out_per_second']:,.0f}" for best in vision)
    firsts = " / ".join(f"{best['ttft_ms']['p50'] / 1e3:.2f}" for best in vision)
    yield "Qwen2.5-VL 7B", [f"{speeds}; {firsts} s"]


def on_cpu() -> Iterator[Row]:
    found = result("cpu-smollm2-135m")
    engines = list(found["engines"].values())
    labels = {
        "W1 ms per token": ("W1, one stream", ".1f"),
        "W1 first token, ms": ("W1, time to first token", ".0f"),
        "W2 tok/s": ("W2, ", ",.0f"),
        "W3 prompt tok/s": ("W3, ", ",.0f"),
        "W4 s": ("W4, ", ".1f"),
    }
    for name, (label, form) in labels.items():
        ratio = found["ratios"][name]["times_as_fast"]
        yield label, [*(format(engine["best"][name], form) for engine in engines), f"{ratio:.2f}"]
    yield "memory of all", [f"{engine['final_mb']:,.0f}" for engine in engines]
    yield "start-up time", [f"{engine['ready_seconds']:.1f}" for engine in engines]
    for label, name in (("Qwen2.5-Coder-1.5B", "cpu-qwen2.5-coder-1.5b"), ("an 8B shape", "cpu-llama-8b")):
        best = [engine["best"] for engine in result(name)["engines"].values()]
        yield label, [" / ".join(f"{each[key]:{form}}" for each in best) for key, form in LARGER[name]]
    shares = result("cpu-neighbours-smollm2-135m")["share_of_alone"]
    nice = [" / ".join(f"{shares[f'beside nice {value}'][each]:.2f}" for value in (0, 19)) for each in ("W1", "W2")]
    yield "next to a busy process", nice
    yield "in a container limited", [f"{shares['1.5 CPUs'][each]:.2f}" for each in ("W1", "W2")]


LARGER = {
    "cpu-qwen2.5-coder-1.5b": [("W1 ms per token", ".1f"), ("W5 tok/s", ".1f")],
    "cpu-llama-8b": [("W1 ms per token", ".0f"), ("W5 tok/s", ".1f")],
}


@pytest.mark.parametrize(
    ("label", "figures"), [*on_gpu(), *on_cpu()], ids=lambda case: case if isinstance(case, str) else ""
)
def test_figures_are_those_of_the_result_files(label: str, figures: list[str]) -> None:
    assert cells(PERFORMANCE, label)[: len(figures)] == figures


def test_the_readme_has_the_same_figures() -> None:
    pairs, _ = beside_vllm()
    labels = ("one stream, 128", "256 streams, 128", "64 prompts of", "512 requests of")
    for label, pair in zip(labels, pairs, strict=True):
        assert cells(ROOT / "README.md", label) == [f"{each:,.0f}" for each in pair]
