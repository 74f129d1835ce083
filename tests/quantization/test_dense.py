"""Plain matrices on a CPU: each way to keep one computes the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from legato.quantization.dense import DenseWeight, PackedWeight, SlicedWeight, dense_weight


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("hurries", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 130])
@pytest.mark.parametrize("num_inputs", [1, 191, 192, 193, 576, 1000])
def test_a_small_matrix_gives_the_product_in_one_sum_and_in_slices(
    num_inputs: int, num_rows: int, has_bias: bool, hurries: bool
) -> None:
    weight, x = random(40, num_inputs), random(num_rows, num_inputs)
    bias = random(40) if has_bias else None
    small = dense_weight(weight, bias)
    assert isinstance(small, SlicedWeight)
    with SlicedWeight.in_one_sum(hurries):
        product = small.apply(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)


def test_slices_round_better_than_one_sum() -> None:
    """The reason for them. With all products alike, what is added last is far smaller than the sum it is added to."""
    x, weight = torch.full((8, 1536), 0.1), torch.full((16, 1536), 0.1)
    exact = F.linear(x.double(), weight.double())
    small = SlicedWeight(weight, None)
    in_slices = (small.apply(x) - exact).abs().max()
    with SlicedWeight.in_one_sum(True):
        in_one = (small.apply(x) - exact).abs().max()
    assert in_slices < in_one


def test_the_hurry_ends_with_the_step_that_fails() -> None:
    with pytest.raises(RuntimeError), SlicedWeight.in_one_sum(True):
        raise RuntimeError
    assert not SlicedWeight._hurries


def test_a_large_matrix_is_kept_once() -> None:
    large = dense_weight(torch.zeros(2**11 + 1, 2**10))
    assert isinstance(large, PackedWeight) and not isinstance(large, SlicedWeight)


def test_half_precision_is_left_to_the_framework() -> None:
    assert isinstance(dense_weight(torch.zeros(4, 4, dtype=torch.bfloat16)), DenseWeight)
