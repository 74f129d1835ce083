"""GGUF files whose matrices stay packed on a GPU: every block type compared with float64, and the engine's workloads.

    python -m benchmarks.packed_gguf --json benchmarks/results/gguf-h200-llama-8b.json

The engine serves a file of random Q4_1 blocks in the shape of Llama-3.1-8B, written to a temporary folder (5 GB).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.kernel_cases import distance
from legato.benchmark.cpu.dummy_gguf import write_dummy_gguf
from legato.benchmark.report import environment, write_json
from legato.modelfiles.gguf.file import GgmlType
from legato.quantization.gguf_forms import FORMS, packed_matrix
from legato.quantization.weight import weight_of

ROWS = (1, 2, 3, 8, 16, 17, 64, 100, 300, 2048)
SHAPES = ((768, 1024), (4096, 2048))
# ‖ours - float64‖ / ‖float64‖. From 17 rows on 4-bit numbers may be multiplied in fp8 (`quantization/fp8_copies.py`).
TOLERANCE = 5e-2
# Where the 16-bit scales of a block are. Everything else in it may be any byte.
HALF_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind: GgmlType, rows: int, columns: int) -> torch.Tensor:
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (rows * columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for begin in HALF_SCALES[kind.name]:
        scales = rng.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, columns // kind.block_size, -1))


def errors(device: torch.device) -> dict[str, dict[str, float]]:
    """Of every type, by shape and number of rows."""
    found: dict[str, dict[str, float]] = {}
    for kind in FORMS:
        for out_features, in_features in SHAPES:
            matrix = packed_matrix(random_blocks(kind, out_features, in_features).to(device), kind)
            exact, weight = matrix.values(torch.float64), weight_of([matrix])
            for rows in ROWS:
                x = torch.randn(rows, in_features, device=device, dtype=torch.bfloat16)
                error = distance(weight.apply(x), x.double() @ exact.T)
                found.setdefault(kind.name, {})[f"{out_features}x{in_features}, {rows} rows"] = error
        print(kind.name, f"largest error {max(found[kind.name].values()):.4f}", flush=True)
    return found


def engine_figures(workloads: str, repeat: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path, figures = write_dummy_gguf("llama-8b", Path(folder) / "model"), Path(folder) / "figures.json"
        words = ["bench", "engine", "--model", str(path), "--workload", workloads, "--repeat", str(repeat)]
        subprocess.run([sys.executable, "-m", "legato.cli", *words, "--json", str(figures)], check=True)
        found: dict[str, Any] = json.loads(figures.read_text())["workloads"]
    return {name: value["best"] for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--workloads", default="G1,G2,G3", help="separated by commas; none with an empty string")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    report: dict[str, Any] = {**environment(), "errors": errors(torch.device(given.device))}
    if given.workloads:
        report["engine"] = engine_figures(given.workloads, given.repeat)
    if given.json is not None:
        write_json(given.json, report)
    worst = max(error for by_case in report["errors"].values() for error in by_case.values())
    print(
        f"largest error {worst:.4f}",
        *(f"{name} {figures}" for name, figures in report.get("engine", {}).items()),
        sep="\n",
    )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
