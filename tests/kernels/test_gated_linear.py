from __future__ import annotations

import pytest
import torch

from legato.kernels import gated_linear as module
from legato.kernels.device import GpuLimits
from legato.kernels.gated_linear import gated_linear, suits
from legato.quantization.dense import DenseWeight, _gated_linear_torch

H200 = GpuLimits(90, 232448)


@pytest.fixture
def hopper() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon has no interpreter: this kernel runs on Hopper GPUs only")
    return torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inner", "inputs"), [(1, 128, 64), (130, 256, 192), (1100, 1152, 4096), (2048, 14336, 512)]
)
def test_equals_a_product_and_the_activation(hopper, assert_close, rows, inner, inputs, dtype):
    x, weight = (torch.randn(shape, device=hopper).to(dtype) for shape in ((rows, inputs), (2 * inner, inputs)))
    weight *= inputs**-0.5
    assert_close(gated_linear(x, weight, "silu"), _gated_linear_torch(x, weight, "silu"))


def test_large_steps_go_there(hopper, monkeypatch):
    asked = []
    monkeypatch.setattr("legato.quantization.dense.gated_linear", lambda *given: asked.append(given))
    weight = torch.zeros(2 * 14336, 4096, dtype=torch.bfloat16, device=hopper)
    DenseWeight(weight, None).apply_gated(torch.zeros(2048, 4096, dtype=torch.bfloat16, device=hopper), "silu")
    assert len(asked) == 1


def suits_on_hopper(monkeypatch, rows, inner=14336, inputs=4096, dtype=torch.bfloat16, activation="silu") -> bool:
    monkeypatch.setattr(module, "is_available", lambda kernel, tensor: True)
    monkeypatch.setattr(module, "limits_of", lambda tensor: H200)
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, inputs), (2 * inner, inputs)))
    return suits(x, weight, activation)


@pytest.mark.skipif(module.gl is None, reason="Triton is not installed")
def test_full_rounds_of_tiles_suit_it(monkeypatch):
    """On 132 multiprocessors."""
    assert H200.num_multiprocessors == 132
    assert [rows for rows in range(128, 2177, 128) if suits_on_hopper(monkeypatch, rows)] == [
        1024, 1152, 1280, 1792, 1920, 2048, 2176,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [{"inner": 11000}, {"inputs": 100}, {"dtype": torch.float32}, {"activation": "gelu"}])
def test_what_it_cannot_do_goes_elsewhere(monkeypatch, shape):
    assert not suits_on_hopper(monkeypatch, 2048, **shape)
