from __future__ import annotations

import pytest
import torch

from legato.kernels import small_linear as linear
from legato.kernels.activation import _gate_and_mul_triton
from legato.kernels.arrival import arrival_counters
from legato.kernels.few_linear import FewConfig, few_config, few_linear
from legato.kernels.small_linear import LinearConfig

VECTOR = LinearConfig(tile_rows=8, block_k=32, num_warps=4)
SPLIT_VECTOR = LinearConfig(tile_rows=8, block_k=32, num_warps=4, split_k=3)
MATRIX = FewConfig(tile_rows=16, block_k=32, num_warps=4)
SPLIT_MATRIX = FewConfig(tile_rows=16, block_k=32, num_warps=4, split_k=3)
CONFIGS = [VECTOR, MATRIX, SPLIT_VECTOR, SPLIT_MATRIX]


def check_against_torch(assert_close, x, weight, config, bias=None):
    run = few_linear if isinstance(config, FewConfig) else linear._small_linear_triton
    actual = run(x, weight, bias, config)
    assert_close(actual, linear._small_linear_torch(x, weight, bias))


def scaled(weight):
    """So that results are about 1 and absolute tolerances mean something."""
    return weight / weight.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_equals_torch_in_every_dtype(randn, assert_close, config, dtype):
    rows = 3 if isinstance(config, FewConfig) else 1
    check_against_torch(assert_close, randn(rows, 128, dtype=dtype), scaled(randn(40, 128, dtype=dtype)), config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (41, 100), (24, 200)])
def test_equals_torch_for_odd_shapes(randn, assert_close, config, out_features, in_features):
    check_against_torch(assert_close, randn(1, in_features), scaled(randn(out_features, in_features)), config)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16])
def test_equals_torch_for_any_number_of_rows(randn, assert_close, rows):
    check_against_torch(assert_close, randn(rows, 64), scaled(randn(20, 64)), MATRIX)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_bias_is_added_once(randn, assert_close, config):
    rows = 2 if isinstance(config, FewConfig) else 1
    check_against_torch(assert_close, randn(rows, 70), scaled(randn(42, 70)), config, bias=randn(42))


def test_rows_that_lie_apart(randn, assert_close):
    check_against_torch(assert_close, randn(3, 80)[:, 8:72], scaled(randn(20, 64)), MATRIX)


def test_counters_are_zero_again_after_a_split(randn, device, assert_close):
    check_against_torch(assert_close, randn(1, 100), scaled(randn(30, 100)), SPLIT_VECTOR)
    assert not arrival_counters(device).any()


@pytest.mark.parametrize("out_features", [64, 4096])
def test_the_chosen_configs_equal_torch(randn, assert_close, out_features):
    for rows, config in ((1, linear.linear_config(out_features, 256)), (4, few_config(4, out_features, 2048))):
        check_against_torch(assert_close, randn(rows, 256), scaled(randn(40, 256)), config)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("config", CONFIGS)
def test_gate_and_up_in_one_kernel_are_bit_identical(randn, device, config, activation):
    """20 features: the last tile is not full. In the interpreter NumPy multiplies tiles; the order of its sums depends
    on their shape and on the processor: there the numbers are such that every order has the same sum."""
    x, weight = randn(2 if isinstance(config, FewConfig) else 1, 70), scaled(randn(40, 70))
    if device.type == "cpu":
        x, weight = (x * 8).round() / 8, (weight * 64).round() / 64
    run = few_linear if isinstance(config, FewConfig) else linear._small_linear_triton
    product = run(x, weight, None, config)
    assert torch.equal(run(x, weight, None, config, activation), _gate_and_mul_triton(product, activation))


def test_long_matrices_of_few_rows_are_split():
    assert few_config(8, 4096, 14336).split_k == few_config(16, 4096, 4096).split_k == 8
    assert few_config(8, 28672, 4096).split_k == few_config(8, 64, 512).split_k == 1


def test_rows_on_a_cpu_are_left_to_torch(randn):
    assert not linear.pays(torch.zeros(2, 8))


def test_more_rows_than_it_is_made_for_are_refused(randn):
    with pytest.raises(AssertionError):
        linear.small_linear(randn(17, 8), randn(4, 8))
