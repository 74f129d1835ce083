"""Readers beside what the library of the format makes of the same tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from legato.models.sources import SafetensorsSource
from legato.models.weights import Weights
from legato.quantization.method import Method
from legato.quantization.readers.eight_bit import EightBitReader
from legato.quantization.readers.tables import GptOssReader
from legato.quantization.stored import MatrixSlice, Reader
from legato.quantization.weight import Matrix


def read(folder: Path, tensors: dict[str, torch.Tensor], reader: Reader, wanted: MatrixSlice) -> Matrix:
    save_file(tensors, folder / "model.safetensors")
    source = SafetensorsSource([folder / "model.safetensors"])
    weights = Weights(source, torch.float32, torch.device("cpu"), method=Method("test", reader))
    assert reader.has(wanted.name, weights)
    matrix = reader.read(wanted, weights)
    weights.check_all_used()
    return matrix


@pytest.mark.parametrize("part", [None, [(40, 80), (0, 8)]])
def test_experts_of_gpt_oss(tmp_path: Path, part: list[tuple[int, int]] | None) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 48, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 48, 4), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).reshape(96, 128)
    tensors = {"m.gate_up_proj_blocks": blocks, "m.gate_up_proj_scales": scales}
    matrix = read(tmp_path, tensors, GptOssReader(), MatrixSlice("m.gate_up_proj", 96, 128, part, (16, 112)))
    rows = torch.cat([theirs[slice(*each)] for each in part or [(0, 96)]])
    assert not isinstance(matrix, torch.Tensor)
    assert torch.equal(matrix.dense(torch.bfloat16), rows[:, 16:112])


def test_blocks_of_deepseek(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    numbers = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) / 100
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scale, torch.float32)
    tensors = {"m.weight": numbers, "m.weight_scale_inv": scale}
    matrix = read(tmp_path, tensors, EightBitReader((128, 128)), MatrixSlice("m", 256, 384))
    assert not isinstance(matrix, torch.Tensor)
    assert torch.equal(matrix.dense(torch.float32), theirs)


def test_a_part_of_blocks_that_do_not_fill_the_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    whole = numbers.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    tensors = {"m.weight": numbers, "m.weight_scale_inv": scale}
    wanted = MatrixSlice("m", 200, 300, [(150, 200), (0, 20)], (100, 290))
    matrix = read(tmp_path, tensors, EightBitReader((128, 128)), wanted)
    assert not isinstance(matrix, torch.Tensor)
    assert torch.equal(matrix.dense(torch.float32), torch.cat((whole[150:], whole[:20]))[:, 100:290])


def test_int8_with_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    scale, zero = torch.rand(6, 1), torch.randint(-20, 20, (6, 1), dtype=torch.int8)
    tensors = {"m.weight": numbers, "m.weight_scale": scale, "m.weight_zero_point": zero}
    matrix = read(tmp_path, tensors, EightBitReader(), MatrixSlice("m", 6, 32, None, (8, 20)))
    assert not isinstance(matrix, torch.Tensor)
    assert torch.equal(matrix.dense(torch.float32), ((numbers.float() - zero) * scale)[:, 8:20])
