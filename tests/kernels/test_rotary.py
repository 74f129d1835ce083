from __future__ import annotations

import pytest
import torch

from legato.kernels import rotary

NAN = float("nan")


def case(randn, device, *, tokens=5, heads=4, kv_heads=2, head_dim=64, rotary_dim=None, block_size=16, dtype=None):
    """Arguments of the kernel; the caches are poisoned, so that a wrong slot shows."""
    dtype = dtype or torch.float32
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(device)
    num_blocks = 64 // block_size + tokens
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].to(torch.int32).to(device)
    table = randn(50, rotary_dim) if rotary_dim else None
    k_cache, v_cache = (
        torch.full((num_blocks, block_size, kv_heads, head_dim), NAN, dtype=dtype, device=device) for _ in range(2)
    )
    return [qkv, positions, table, k_cache, v_cache, slots]


def copies(arguments):
    return [None if tensor is None else tensor.clone() for tensor in arguments]


def check_against_torch(arguments, assert_close):
    expected, actual = copies(arguments), copies(arguments)
    rotary._rotary_and_store_torch(*expected)
    rotary._rotary_and_store_triton(*actual)
    assert_close(actual[0], expected[0])
    for actual_cache, expected_cache in zip(actual[3:5], expected[3:5], strict=True):
        assert torch.equal(actual_cache.isnan(), expected_cache.isnan())
        assert_close(actual_cache.nan_to_num(), expected_cache.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (12, 12), (14, 2)])
def test_equals_torch_for_any_group(randn, device, assert_close, heads, kv_heads, dtype):
    check_against_torch(case(randn, device, heads=heads, kv_heads=kv_heads, dtype=dtype), assert_close)


@pytest.mark.gpu
def test_rounds_where_torch_rounds(randn, device):
    """Bit for bit: in bfloat16 a product that is not rounded before the sum shows in the tokens."""
    if device.type != "cuda":
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding; test_compile looks at the code")
    arguments = case(randn, device, tokens=64, heads=8, head_dim=128, dtype=torch.bfloat16)
    arguments[2] = arguments[2].bfloat16()
    expected = copies(arguments)
    rotary._rotary_and_store_torch(*expected)
    rotary._rotary_and_store_triton(*arguments)
    assert torch.equal(arguments[0], expected[0])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 80), (80, 32), (96, 24), (128, 128), (256, 64), (64, 0)])
def test_equals_torch_for_any_head(randn, device, assert_close, head_dim, rotary_dim):
    check_against_torch(case(randn, device, head_dim=head_dim, rotary_dim=rotary_dim), assert_close)


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_equals_torch_for_any_block_size(randn, device, assert_close, block_size):
    check_against_torch(case(randn, device, block_size=block_size), assert_close)


def test_a_negative_slot_is_turned_but_not_stored(randn, device, assert_close):
    arguments = case(randn, device)
    arguments[5][[0, 3]] = -1
    check_against_torch(arguments, assert_close)


def test_turning_twice_by_opposite_angles_restores(randn, device, assert_close):
    arguments = case(randn, device, heads=3, kv_heads=1)
    angles = randn(50, 32)
    there = torch.cat((angles.cos(), angles.sin()), dim=-1)
    back = torch.cat((angles.cos(), -angles.sin()), dim=-1)
    before = arguments[0].clone()
    for table in (there, back):
        arguments[2] = table
        rotary.rotary_and_store(*arguments)
    assert_close(arguments[0], before)


def test_a_padded_projection_is_read_by_its_stride(randn, device, assert_close):
    arguments = case(randn, device)
    wide = randn(5, arguments[0].shape[1] + 8)
    expected = copies(arguments)
    expected[0] = wide[:, :-8].clone()
    rotary._rotary_and_store_torch(*expected)
    rest = wide[:, -8:].clone()
    arguments[0] = wide[:, :-8]
    rotary._rotary_and_store_triton(*arguments)
    assert_close(wide[:, :-8], expected[0])
    assert torch.equal(wide[:, -8:], rest)
