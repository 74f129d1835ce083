"""`--disable-custom-kernels`: everything is computed by torch, and comes to the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from legato.kernels import language
from legato.kernels.language import enable_triton, runs_triton
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.server.loading import load
from legato.server.model import Model
from legato.server.warmup import decode_step, first_step
from tests.server.local import DEVICE
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
