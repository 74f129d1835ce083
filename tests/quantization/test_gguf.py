"""Every block format against the `gguf` package, whose decoders are the reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from legato.common.errors import UnsupportedModel
from legato.modelfiles.gguf.file import GgmlType
from legato.quantization.gguf import NUMBERS_AT_ONCE, dequantize

# type -> where its 16-bit scales are; everything else in a block may be any byte
HALF_SCALES = {
    GgmlType.Q4_0: [0],
    GgmlType.Q4_1: [0, 2],
    GgmlType.Q5_0: [0],
    GgmlType.Q5_1: [0, 2],
    GgmlType.Q8_0: [0],
    GgmlType.Q2_K: [80, 82],
    GgmlType.Q3_K: [108],
    GgmlType.Q4_K: [0, 2],
    GgmlType.Q5_K: [0, 2],
    GgmlType.Q6_K: [208],
}


def random_blocks(ggml_type: GgmlType, num_blocks: int) -> np.ndarray:
    """Random bytes with finite scales, as quantising real numbers would never cover all bit patterns."""
    rng = np.random.default_rng(int(ggml_type))
    blocks = rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    for begin in HALF_SCALES[ggml_type]:
        scales = rng.normal(0, 0.1, (num_blocks, 1)).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("ggml_type", HALF_SCALES, ids=lambda ggml_type: ggml_type.name)
def test_quantised_blocks_decode_to_the_numbers_of_the_reference(ggml_type: GgmlType) -> None:
    blocks = random_blocks(ggml_type, num_blocks=24)
    reference = gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType(ggml_type))
    decoded = dequantize(blocks.reshape(-1), ggml_type, (6, 4 * ggml_type.block_size))
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.numpy(), reference)


@pytest.mark.parametrize("ggml_type", [GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0])
def test_real_numbers_survive_being_quantised(ggml_type: GgmlType) -> None:
    numbers = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType(ggml_type))
    decoded = dequantize(blocks.reshape(-1), ggml_type, (8, 96)).numpy()
    assert np.abs(decoded - numbers).max() < {8: 0.02}.get(int(ggml_type), 0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_numbers_are_exact_down_to_infinities(dtype: torch.dtype) -> None:
    ggml_type = {torch.float32: GgmlType.F32, torch.float16: GgmlType.F16, torch.bfloat16: GgmlType.BF16}[dtype]
    numbers = torch.tensor([[0.0, -0.0, 1.5], [float("inf"), -3e-5, float("-inf")]]).to(dtype)
    raw = numbers.view(torch.uint8).numpy().reshape(-1)
    assert torch.equal(dequantize(raw, ggml_type, (2, 3)), numbers.float())


def test_q8_k_is_a_float_scale_times_signed_bytes() -> None:
    quants = np.arange(-128, 128, dtype=np.int8)
    scale = np.array([0.25], dtype=np.float32)
    sums = quants.astype(np.int16).reshape(16, 16).sum(axis=1, dtype=np.int16)
    raw = np.concatenate([part.view(np.uint8) for part in (scale, quants, sums)])
    assert torch.equal(dequantize(raw, GgmlType.Q8_K, (1, 256)), torch.arange(-128, 128)[None] * 0.25)


def test_tensors_larger_than_one_pass_have_no_seam() -> None:
    num_blocks = NUMBERS_AT_ONCE // 32 + 5
    blocks = random_blocks(GgmlType.Q4_1, num_blocks)
    whole = dequantize(blocks.reshape(-1), GgmlType.Q4_1, (num_blocks, 32))
    for row in (0, num_blocks - 6, num_blocks - 5, num_blocks - 1):
        assert torch.equal(whole[row : row + 1], dequantize(blocks[row], GgmlType.Q4_1, (1, 32)))


def test_the_result_never_aliases_the_file() -> None:
    raw = np.zeros(16, dtype=np.uint8)
    raw.flags.writeable = False
    decoded = dequantize(raw, GgmlType.F32, (4,))
    decoded += 1
    assert raw.sum() == 0


def test_an_unsupported_type_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"IQ2_XS.*Q4_K"):
        dequantize(np.zeros(74, dtype=np.uint8), GgmlType.IQ2_XS, (256,))
