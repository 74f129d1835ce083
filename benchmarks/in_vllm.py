"""Workloads of `legato bench engine` in vLLM, in its own process and with nothing around it.

    PYTHONPATH=where/vllm/is python -m benchmarks.in_vllm --model llama-8b --json figures.json

`benchmarks.beside_vllm` calls it, and `benchmarks.long_context` with `--long`. Only the package that has the workloads
is shared with Legato; vLLM's settings are those that its figures were published with: CUDA graphs, up to 512 requests
at once, no prefix cache unless a workload is about what was computed before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import long_cases
from legato.benchmark.engine.workloads import Scale, Workload, make_workloads
from legato.modelfiles.shapes import SHAPES, write_shape

LONGEST, MOST_REQUESTS = 4096, 512
MEMORY_SHARE = 0.88
# Nothing is fetched, reported or compiled by other tools: greedy answers need no sampler of flashinfer's.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


class VLLM:
    def __init__(self, model: str, folder: Path, longest: int = LONGEST, prefix_caching: bool = False) -> None:
        # Imported late: `--help` must work without it.
        self._vllm: Any = import_module("vllm")
        self.version: str = self._vllm.__version__
        self._engine = self._vllm.LLM(
            model=str(write_shape(model, folder / model)),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=MOST_REQUESTS,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=prefix_caching,
            seed=0,
        )

    def seconds(self, workload: Workload) -> float:
        """Greedy, every answer as long as the workload says."""
        params = [
            self._vllm.SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
            for new in workload.new_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        started = time.perf_counter()
        answers = self._engine.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - started
        lengths = [len(answer.outputs[0].token_ids) for answer in answers]
        assert lengths == workload.new_tokens, "vLLM answered with another number of tokens"
        return taken


def figures(workload: Workload, taken: float) -> dict[str, Any]:
    """Under the names that `legato bench engine` has for them."""
    rates = {"in_per_second": workload.num_in / taken, "out_per_second": workload.num_out / taken}
    return {"seconds": taken, "num_in": workload.num_in, "num_out": workload.num_out, **rates}


def fixed_figures(engine: VLLM, workloads: Sequence[Workload], repeat: int) -> dict[str, Any]:
    results = {}
    for workload in workloads:
        runs = [figures(workload, engine.seconds(workload)) for _ in range(repeat)]
        results[workload.name] = {"best": min(runs, key=lambda run: float(run["seconds"])), "runs": runs}
    return results


def long_figures(engine: VLLM, cases: Sequence[long_cases.Case], scale: Scale) -> dict[str, Any]:
    results = {}
    for case in cases:
        seconds = [engine.seconds(run) for run in long_cases.runs(case, scale)]
        results[case.name] = long_cases.collected(case, seconds, scale)
        print(case.name, results[case.name], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--workload", default="G1,G2,G3,G4", help="separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each")
    parser.add_argument("--scale", type=int, default=1, help="divide the workloads by this")
    parser.add_argument("--long", metavar="NAMES", help="cases of `benchmarks.long_context` instead, or all")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    given = parser.parse_args()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    vocab_size = int(SHAPES[given.model]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        engine = VLLM(
            given.model, Path(folder), *((LONGEST, False) if given.long is None else (long_cases.LONGEST, True))
        )
        engine.seconds(Workload("probe", [[10]], [1]))
        first_token = time.perf_counter() - started
        if given.long is not None:
            results = long_figures(engine, long_cases.chosen(given.long), Scale(given.scale, vocab_size))
        else:
            results = fixed_figures(
                engine, make_workloads(given.workload.split(","), given.scale, vocab_size), given.repeat
            )
    report = {"vllm": engine.version, "first_token_seconds": first_token, "workloads": results}
    given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
