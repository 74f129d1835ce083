"""`--disable-custom-kernels`: everything is computed by torch, and comes to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from legato.kernels import language
from legato.kernels.language import enable_triton, runs_triton
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import GenerationRequest
from legato.server import engine
from legato.server.loading import load
from legato.server.memory.warmup import decode_step, first_step
from legato.server.model import Model
from tests.models.tiny_experts import tiny_mixtral
from tests.models.tiny_seeds import tiny_bloom
from tests.models.tiny_today import tiny_gemma2
from tests.server.local import DEVICE, LocalServer
from tests.server.local import load as load_local
from tests.server.shard import OPTIONS, warmup
from tests.tiny_models import tiny_llama

ON_GPU = SimpleNamespace(is_cuda=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles.open(tiny_llama(tmp_path_factory.mktemp("llama"), head_dim=64))


@pytest.fixture(autouse=True)
def enabled_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(language, "tl", language.tl or object())
    yield
    enable_triton(True)


@pytest.mark.parametrize("disabled", [False, True])
def test_the_option_decides_who_computes(files: ModelFiles, disabled: bool) -> None:
    options = replace(OPTIONS, disable_custom_kernels=disabled)
    model = Model(load(files, options), options)
    assert runs_triton(ON_GPU) is not disabled  # type: ignore[arg-type]
    assert model.graph_sizes == ((0,) if disabled else ())


@pytest.mark.parametrize("make", [tiny_llama, tiny_bloom, tiny_gemma2, tiny_mixtral])
def test_the_torch_versions_of_the_kernels_serve_every_kind_of_step(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose own attention is another one, they run if a step has no context for that."""
    model = load_local(make(tmp_path))
    requests = [
        GenerationRequest(i, [(7 * i + j) % 90 + 5 for j in range(length)], 12, ignore_eos=True)
        for i, length in enumerate((3, 40, 17))
    ]
    expected = LocalServer(model, step_tokens=32).run(requests)
    prepare = engine.prepare
    monkeypatch.setattr(engine, "prepare", lambda *arguments: replace(prepare(*arguments), on_host=None))
    assert LocalServer(model, step_tokens=32).run(requests) == expected


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs LEGATO_TEST_DEVICE=cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_without_triton(files: ModelFiles, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(disabled: bool) -> list[int]:
        options = replace(OPTIONS, device="cuda", dtype=dtype, disable_custom_kernels=disabled, block_size=16)
        model = Model(load(files, options), options)
        capacity = model.warmup(warmup())
        if disabled:
            assert model.engine.graphs is None
            monkeypatch.setattr(language, "tl", None)  # a kernel that is launched all the same would fail
        prompt = first_step(capacity, model.block_size)
        steps: list[pb.StepRequest] = [prompt, *(decode_step() for _ in range(7))]
        return [model.engine.launch(step).read().token_ids[0] for step in steps]

    with torch.inference_mode():
        assert tokens(disabled=True) == tokens(disabled=False)
