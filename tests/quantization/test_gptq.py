"""GPTQ: smaller errors than rounding to nearest, in the published layout."""

from __future__ import annotations

import pytest
import torch

from legato.quantization.gptq import GptqOptions, Hessian, pack_words, quantize
from legato.quantization.packing import unpack_words
from tests.quantization.packers import bit_stream


def activations(num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Correlated, and of different sizes, as those of a model are."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(2048, num_inputs // 4, generator=generator) @ torch.randn(
        num_inputs // 4, num_inputs, generator=generator
    )
    sizes = torch.rand(num_inputs, generator=generator) * 3
    return (mixed + torch.randn(2048, num_inputs, generator=generator)) * sizes


def errors(options: GptqOptions, num_inputs: int = 256) -> tuple[float, float]:
    """Squared error of the product, by GPTQ and by rounding to nearest."""
    weight = torch.randn(48, num_inputs, generator=torch.Generator().manual_seed(1))
    x = activations(num_inputs)
    hessian = Hessian(num_inputs, torch.device("cpu"))
    for part in x.split(500):
        hessian.add(part)
    identity = torch.eye(num_inputs)
    found = [quantize(weight, each, options).dense() for each in (hessian.value, identity)]
    ours, nearest = (float((x @ (each - weight).T).square().sum()) for each in found)
    return ours, nearest


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_error_is_smaller_than_that_of_rounding_to_nearest(
    bits: int, group_size: int, act_order: bool, sym: bool
) -> None:
    ours, nearest = errors(GptqOptions(bits, group_size, act_order, sym))
    assert ours < 0.6 * nearest


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    options = GptqOptions(4, 32, sym=False)
    found = quantize(weight, torch.eye(64) * 3, options)
    scale = found.scale.float()[:, found.index]
    assert ((found.dense() - weight).abs() <= scale / 2 + 1e-4).float().mean() > 0.95  # the rest is cut off


@pytest.mark.parametrize("bits", [2, 4])
def test_no_zero_is_0_which_minus_one_has_no_code(bits: int) -> None:
    """Also where all weights of a group are positive."""
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 1
    for act_order in (False, True):
        found = quantize(weight, torch.eye(64), GptqOptions(bits, 32, act_order))
        assert int(found.zero.min()) == 1
        assert float((found.dense() - weight).abs().max()) < 2.5 / (1 << bits)


def test_inputs_that_were_never_seen_do_no_harm() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(64, torch.device("cpu"))
    x = activations(64)
    x[:, 5] = 0
    hessian.add(x)
    found = quantize(weight, hessian.value, GptqOptions(4, 32)).dense()
    assert found.isfinite().all()


def test_a_hessian_of_few_tokens_is_damped_until_it_can_be_inverted() -> None:
    hessian = Hessian(64, torch.device("cpu"))
    hessian.add(torch.ones(2, 64) * 1e6)
    assert quantize(torch.randn(8, 64), hessian.value, GptqOptions(4, 32)).dense().isfinite().all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_packed_as_published(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 96), generator=torch.Generator().manual_seed(bits))
    packed = pack_words(codes, bits, 1)
    assert torch.equal(packed, torch.from_numpy(bit_stream(codes.numpy(), bits)))
    assert torch.equal(unpack_words(packed, bits, 1, 96), codes.to(torch.uint8))
    assert torch.equal(pack_words(codes, bits, 0), torch.from_numpy(bit_stream(codes.T.numpy().copy(), bits)).T)


def test_the_order_of_the_inputs_is_that_of_their_activations() -> None:
    hessian = torch.diag(torch.arange(64.0) + 1)
    found = quantize(torch.randn(8, 64), hessian, GptqOptions(4, 16, act_order=True))
    assert found.index.tolist() == [3] * 16 + [2] * 16 + [1] * 16 + [0] * 16
