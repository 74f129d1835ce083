"""Which kernels a start compiles, and which its other stages launch: warm-up of the 8B shape as on an H200.

    python -m tests.kernels.warm_up              # counts: nothing is compiled
    python -m tests.kernels.warm_up --compile    # compiles each for 9.0, one after the other, and says how long it took
    python -m tests.kernels.warm_up --start processes    # as a start does, or on `threads`; says how long stages took

Prints a line of JSON for each variant of a kernel: the stage that asked for it first, its name, constants and options.
Tensors are in the host's memory and say that they are on a GPU; kernels write nothing, and no matrix product is
computed. The model has two layers, and the vocabulary and the widths of the shape.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from triton.runtime import driver

from legato.common.options import ServerOptions
from legato.kernels import device, language
from legato.kernels.compilation import ahead
from legato.kernels.compilation.start import CompilerStart
from legato.layers.kv_cache import KVCache
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import SHAPES
from legato.models import dummy
from legato.models.registry import get_model, model_config
from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import PromptScores
from legato.sampling.sampler import Sampled, Sampler
from legato.scheduling.budget import STEP_SIZES
from legato.server import engine as engines
from legato.server import prepare as preparation
from legato.server.loading import LoadedModel
from legato.server.memory.capacity import Capacity, RequestedLimits
from legato.server.model import Model
from tests.kernels.hopper import Driver

SHAPE, MAX_TOTAL_TOKENS, NUM_BLOCKS = "llama-8b", 4096, 260


class Recorder:
    """Stands in for Triton's compiler. What it returns can be launched and does nothing."""

    def __init__(self, compiles: bool) -> None:
        self.stage = ""
        self.found: dict[str, dict[str, Any]] = {}
        self._compile = triton.compiler.compile if compiles else None

    def __call__(self, src: Any, target: Any, options: dict[str, Any], _env_vars: Any = None) -> Any:
        key = f"{src.name} {src.hash()} {sorted(options.items(), key=str)}"
        if key not in self.found:
            constants = {src.fn.arg_names[path[0]]: str(value) for path, value in src.constants.items()}
            signature = [kind for kind in src.signature.values() if kind != "constexpr"]
            self.found[key] = {
                "stage": self.stage, "name": src.name, "num_warps": options["num_warps"],
                "num_stages": options["num_stages"], "constants": constants, "signature": signature,
                "aligned": len(src.attrs),
            }  # fmt: skip
            if self._compile is not None:
                started = time.perf_counter()
                self._compile(src, target=target, options=options)
                self.found[key]["seconds"] = round(time.perf_counter() - started, 2)
        return SimpleNamespace(
            run=lambda *args: None, function=0, packed_metadata=(), launch_metadata=lambda *args: None
        )


def pretend() -> None:
    """Tensors of the host are on an H200 from here on."""
    driver.set_active(Driver())
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    language.runs_triton = lambda tensor: True
    device._limits = lambda device_: device.DEFAULT  # type: ignore[assignment]
    ahead._use_this_device = lambda: lambda: None
    # Matrices of the right shapes, in memory that is never touched.
    dummy.DummyWeights.tensor = _untouched  # type: ignore[method-assign]
    F.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0])  # type: ignore[assignment]
    torch.bmm = lambda x, y, out_dtype=None: torch.empty(*x.shape[:-1], y.shape[-1], dtype=out_dtype or x.dtype)
    F.embedding = lambda ids, table: table.new_empty(*ids.shape, table.shape[1])  # type: ignore[assignment]
    prepare = preparation.prepare
    engines.prepare = lambda *args: replace(prepare(*args), on_host=None)
    # Sampling and scores of prompts have no kernels but torch's.
    Sampler._sample = _sampled  # type: ignore[method-assign]
    engines.prompt_scores = _scored


def _untouched(
    self: dummy.DummyWeights, name: str, shape: tuple[int, ...], cut: Any = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or self.dtype)


def _sampled(self: Sampler, logits: torch.Tensor, *args: Any) -> Sampled:
    return Sampled(torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits)), None)


def _scored(logits: torch.Tensor, successors: torch.Tensor, num_top: int = 0) -> PromptScores:
    size = len(successors), num_top
    return PromptScores(torch.zeros(size[0]), torch.zeros(size, dtype=torch.int64), torch.zeros(size))


class GraphedModel(Model):
    """Captures run their step, and its rows look up tokens that exist."""

    def _make_engine(self, num_blocks: int, requested: RequestedLimits, longest: int, graphs: bool = True) -> Any:
        made = super()._make_engine(num_blocks, requested, longest, graphs)
        if graphs and self.graph_sizes != (0,):

            def record(compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
                made.rows.last_tokens.zero_()
                computed = compute()
                computed.token_ids.zero_()  # no kernel has written them
                return lambda: None, computed

            made.use_graphs(self.graph_sizes, record)
        return made


@contextmanager
def shape_model(
    options: ServerOptions, shape: str, num_layers: int, compiler: CompilerStart | None
) -> Iterator[GraphedModel]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": num_layers}))
        files = ModelFiles.open(Path(folder))
        cpu = torch.device("cpu")
        model = get_model(files, model_config(files), torch.bfloat16, cpu, dummy=True)
        yield GraphedModel(LoadedModel(model, files, cpu, torch.bfloat16), options, compiler=compiler)


def run_stages(model: Model, recorder: Recorder) -> None:
    """As `Model.warmup` on a GPU."""
    sizes = STEP_SIZES["cuda"]
    request = pb.WarmupRequest(
        max_total_tokens=MAX_TOTAL_TOKENS, max_prefill_tokens=sizes.max_tokens, max_rows=sizes.max_rows
    )
    requested = RequestedLimits(request, model.loaded.model.config.max_positions, model.block_size, model.token_bytes)
    recorder.stage = "ahead"
    stage = model._stage

    @contextmanager
    def named(name: str) -> Iterator[None]:
        recorder.stage = "ahead" if name == "compile_seconds" else name.removesuffix("_seconds")
        with stage(name):
            yield

    model._stage = named  # type: ignore[method-assign]
    model._run_largest_steps(requested)
    model._engine = model._make_engine(NUM_BLOCKS, requested, requested.longest)
    assert isinstance(model.engine.cache, KVCache)
    model._first_steps(Capacity(NUM_BLOCKS, sizes.max_rows, MAX_TOTAL_TOKENS - 1, MAX_TOTAL_TOKENS, sizes.max_tokens))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true", help="compile, one after the other")
    parser.add_argument("--start", choices=("threads", "processes"), help="compile as a start does")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=SHAPE)
    parser.add_argument("--layers", type=int, default=2, help="the last one computes rows that sample")
    parser.add_argument("--speculate", type=int, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    recorder = Recorder(given.compile)
    pretend()
    compiler = CompilerStart() if given.start == "processes" else None
    if given.start is None:
        triton.compiler.compile = recorder
    if given.compile:
        ahead.MAX_THREADS = 1
    with shape_model(ServerOptions(speculate=given.speculate), given.shape, given.layers, compiler) as model:
        run_stages(model, recorder)
        for facts in recorder.found.values():
            print(json.dumps(facts))
        if given.start is not None:
            print(json.dumps({name: round(seconds, 2) for name, seconds in model._stages.items()}))


if __name__ == "__main__":
    main()
