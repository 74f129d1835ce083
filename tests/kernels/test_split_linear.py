from __future__ import annotations

import pytest
import torch

from legato.kernels.norm import add_rms_norm
from legato.kernels.split_linear import pays_to_split, split_linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 2, 1), (65, 96, 40), (256, 512, 128)])
def test_the_sum_of_the_parts_is_the_product(randn, rows, inputs, outputs, dtype):
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    parts = split_linear(x, weight)
    assert parts.shape == (2, rows, outputs) and parts.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(parts.double().sum(0), expected, rtol=1e-4, atol=1e-3)


def test_a_norm_takes_the_parts_for_the_product(randn, assert_close):
    x, weight = randn(80, 64, dtype=torch.bfloat16), randn(32, 64, dtype=torch.bfloat16)
    residual, scale = randn(80, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16)
    expected = add_rms_norm((x.double() @ weight.double().T).bfloat16(), residual, scale, 1e-5)
    for ours, theirs in zip(add_rms_norm(split_linear(x, weight), residual, scale, 1e-5), expected, strict=True):
        assert_close(ours, theirs)


def test_it_is_for_gpus_and_narrow_numbers(randn, device):
    wide = randn(128, 64)
    assert not pays_to_split(wide, randn(16, 64))
    assert pays_to_split(wide.half(), randn(16, 64).half()) == (device.type == "cuda")
