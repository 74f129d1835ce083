from __future__ import annotations

import pytest
import torch

from legato.kernels import patch_rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (16, 80), (9, 72), (32, 128)])
def test_equals_torch(randn, device, assert_close, heads, head_dim, dtype):
    """Queries and keys of a packed projection are rotated, its values are not."""
    projection = randn(7, 3 * heads, head_dim, dtype=dtype)
    angles = randn(7, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    expected, actual = projection.clone(), projection.clone()
    patch_rotary._rotate_patches_torch(expected[:, : 2 * heads], cos, sin)
    patch_rotary._rotate_patches_triton(actual[:, : 2 * heads], cos, sin)
    assert_close(actual, expected)
    assert torch.equal(actual[:, 2 * heads :], projection[:, 2 * heads :])


def test_rotates_in_float32_and_rounds_once(randn, device):
    heads, angles = randn(5, 4, 64, dtype=torch.bfloat16), randn(5, 32)
    exact = heads.double()
    low, high = exact.chunk(2, dim=-1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    patch_rotary.rotate_patches(heads, angles.cos(), angles.sin())
    assert ((heads.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all()


def test_an_image_without_patches(randn, device):
    patch_rotary._rotate_patches_triton(randn(0, 4, 64), randn(0, 32), randn(0, 32))
