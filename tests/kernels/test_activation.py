from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from legato.kernels import activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1, 33, 1100])
def test_equals_torch(randn, assert_close, inner, kind, dtype):
    gate_up = randn(3, 2 * inner, dtype=dtype)
    assert_close(activation._gate_and_mul_triton(gate_up, kind), activation._gate_and_mul_torch(gate_up, kind))


def test_reads_strided_rows(randn, assert_close):
    gate_up = randn(4, 50)[:, 5:45]
    assert_close(activation._gate_and_mul_triton(gate_up, "silu"), activation._gate_and_mul_torch(gate_up, "silu"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_large_gates_neither_overflow_nor_turn_to_nan(device, assert_close):
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    for kind in ("silu", "gelu", "gelu_tanh"):
        out = activation._gate_and_mul_triton(torch.cat((gate, torch.ones_like(gate)))[None], kind)
        assert_close(out[0], F.relu(gate))


def test_the_public_function_runs_on_any_device(randn, assert_close):
    gate_up = randn(2, 8)
    assert_close(activation.silu_and_mul(gate_up), F.silu(gate_up[:, :4]) * gate_up[:, 4:])
