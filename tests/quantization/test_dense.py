"""Plain matrices on a CPU: each way to keep one computes the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from legato.quantization.dense import DenseWeight, PackedWeight, dense_weight


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 130])
@pytest.mark.parametrize("num_inputs", [1, 191, 192, 193, 576, 1000])
def test_a_packed_matrix_gives_the_product(num_inputs: int, num_rows: int, has_bias: bool) -> None:
    weight, x = random(40, num_inputs), random(num_rows, num_inputs)
    bias = random(40) if has_bias else None
    packed = dense_weight(weight, bias)
    assert isinstance(packed, PackedWeight)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed.apply(x).double(), exact, rtol=1e-5, atol=1e-4)


def test_a_matrix_is_kept_once() -> None:
    weight = random(40, 576)
    tensors = [value for value in vars(dense_weight(weight)).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) == weight.numel()


def test_half_precision_is_left_to_the_framework() -> None:
    assert isinstance(dense_weight(torch.zeros(4, 4, dtype=torch.bfloat16)), DenseWeight)
