"""Quantized by the libraries themselves, read by Legato: the numbers are those that the libraries dequantize, bit for
bit. `make test-quantizers` installs the libraries."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from legato.models.sources import SafetensorsSource
from legato.models.weights import Weights
from legato.quantization.method import Method
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.readers.bitsandbytes import BitsAndBytesReader
from legato.quantization.readers.compressed_tensors import CompressedTensorsReader, TargetGroup
from legato.quantization.stored import MatrixSlice, Reader

SHAPE = (96, 256)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def numbers_read(folder: Path, tensors: dict[str, torch.Tensor], reader: Reader, shape: torch.Size) -> torch.Tensor:
    """What a reader makes of the tensors of the module `m`."""
    named = {f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    method = Method("checked", reader)
    source = SafetensorsSource([folder / "model.safetensors"])
    weights = Weights(source, torch.float32, torch.device("cpu"), method=method)
    assert reader.has("m", weights)
    matrix = reader.read(MatrixSlice("m", *shape), weights)
    weights.check_all_used()
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dense(torch.float32)


@pytest.mark.parametrize("shape", [SHAPE, (96, 200)])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit(tmp_path: Path, kind: str, double: bool, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
    tensors = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = numbers_read(tmp_path, tensors, BitsAndBytesReader(), weight.shape)
    assert torch.equal(found, bnb.dequantize_4bit(packed, state))


def test_bitsandbytes_8_bit(tmp_path: Path, weight: torch.Tensor) -> None:
    numbers, largest, _ = bnb.int8_vectorwise_quant(weight.half())
    tensors = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = numbers_read(tmp_path, tensors, BitsAndBytesReader(), weight.shape)
    theirs = bnb.int8_vectorwise_dequant(numbers, largest)
    torch.testing.assert_close(found, theirs, rtol=2**-22, atol=0)  # they multiply in another order


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantizing_on_load_is_nearer_than_bitsandbytes(kind: str, weight: torch.Tensor) -> None:
    """In as many bits: blocks of 64 with scales in float32, groups of 32 with scales in 16 bits."""
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind)
    theirs, ours = bnb.dequantize_4bit(packed, state), QUANTIZERS[f"bitsandbytes-{kind}"](weight).dense(torch.float32)
    theirs_off, ours_off = ((each - weight).square().sum() for each in (theirs, ours))
    assert ours_off < 0.8 * theirs_off


def by_group(weight: torch.Tensor, size: int, levels: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [out, groups]."""
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scale = groups.abs().amax(2) / (levels / 2)
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    scale = (high - low) / (levels - 1)
    return scale, (-levels / 2 - low / scale).round().clamp(-levels / 2, levels / 2 - 1).to(torch.int8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [64, 256])
def test_compressed_tensors_packed(tmp_path: Path, weight: torch.Tensor, bits: int, symmetric: bool, size: int) -> None:
    strategy = "channel" if size == SHAPE[1] else "group"
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=size if size < SHAPE[1] else None
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale, zero = by_group(weight, size, 1 << bits, symmetric)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    reader = CompressedTensorsReader([TargetGroup(("Linear",), "pack-quantized", bits)])
    found = numbers_read(tmp_path, stored, reader, weight.shape)
    assert torch.equal(found, compressor.decompress(stored, scheme)["weight"].float())


EIGHT_BITS = {
    "int": dict(num_bits=8, type="int", strategy="channel"),
    "float": dict(num_bits=8, type="float", strategy="tensor"),
    "float by row": dict(num_bits=8, type="float", strategy="channel"),
    "float by block": dict(num_bits=8, type="float", strategy="block", block_structure=[32, 64]),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_compressed_tensors_8_bit(tmp_path: Path, weight: torch.Tensor, name: str) -> None:
    args = QuantizationArgs(symmetric=True, **EIGHT_BITS[name])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    limit = 127 if name == "int" else 448
    if args.strategy == "block":
        scale = weight.abs().view(3, 32, 4, 64).amax((1, 3)) / limit
    elif args.strategy == "tensor":
        scale = weight.abs().amax()[None] / limit
    else:
        scale = weight.abs().amax(1, keepdim=True) / limit
    stored_format = "int-quantized" if name == "int" else "float-quantized"
    compressor = BaseCompressor.get_value_from_registry(stored_format)
    state = {"weight": weight, "weight_scale": scale}
    stored = compressor.compress(state, scheme)
    block = (32, 64) if args.strategy == "block" else None
    reader = CompressedTensorsReader([TargetGroup(("Linear",), stored_format, 8, block)])
    found = numbers_read(tmp_path, stored, reader, weight.shape)
    assert torch.equal(found, compressor.decompress(stored, scheme)["weight"].float())


@pytest.mark.parametrize("name", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"])
def test_compressed_tensors_fp4(tmp_path: Path, weight: torch.Tensor, name: str) -> None:
    size = 32 if name.startswith("mx") else 16
    strategy = "group" if size == 32 else "tensor_group"
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    largest = weight.unflatten(1, (-1, size)).abs().amax(2)
    state = {"weight": weight}
    if size == 32:
        state["weight_scale"] = torch.exp2((largest / 6).log2().ceil())
    else:
        whole = 448 * 6 / weight.abs().amax()
        state["weight_global_scale"] = whole[None]
        state["weight_scale"] = (largest / 6 * whole).to(torch.float8_e4m3fn).float()
    stored = compressor.compress(state, scheme)
    reader = CompressedTensorsReader([TargetGroup(("Linear",), name, 4)])
    found = numbers_read(tmp_path, stored, reader, weight.shape)
    theirs = compressor.decompress(stored, scheme)["weight"]
    # They round to bfloat16.
    torch.testing.assert_close(found.to(theirs.dtype), theirs, rtol=0, atol=0)
