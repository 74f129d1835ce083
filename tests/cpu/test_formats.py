"""What checkpoints have, packed: GGUF's block types, integers of GPTQ and AWQ, int8, and dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from legato.cpu.library import Library, library
from legato.cpu.packed import rounded_to_8_bits
from legato.modelfiles.gguf.file import GgmlType
from legato.models.host import IN_TORCH, HostDecoder, on_host
from legato.quantization import host
from legato.quantization.affine import CODED, AffineGroups, KGroups, coded_like, read_codes
from legato.quantization.gguf import dequantize
from legato.quantization.host import HostWeight, TorchInt8Weight, host_weight
from legato.quantization.matrix import ColumnGroups
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix
from legato.quantization.weight import Matrix, StackedWeight
from tests.cpu.test_forward import SHAPE, Sequences, load, relative_error
from tests.models.tiny_seeds import tiny_gpt2
from tests.models.tiny_t5 import tiny_t5
from tests.quantization.test_gguf import HALF_SCALES, random_blocks
from tests.tiny_models import tiny_llama

needs_library = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")


def stored(matrix: Matrix) -> torch.Tensor:
    """The values of a matrix after it is packed."""
    weight = host_weight([matrix])
    assert isinstance(weight, HostWeight)
    return weight.packed.rows(torch.arange(weight.out_features))


def gguf_matrix(ggml_type: GgmlType, rows: int = 20) -> tuple[Matrix, torch.Tensor]:
    per_row = 3
    blocks = random_blocks(ggml_type, rows * per_row)
    shape = (rows, per_row * ggml_type.block_size)
    exact = dequantize(blocks.reshape(-1), ggml_type, shape)
    return read_codes(blocks.reshape(rows, per_row, -1), ggml_type), exact


@needs_library
@pytest.mark.parametrize("ggml_type", HALF_SCALES, ids=lambda ggml_type: ggml_type.name)
def test_gguf_blocks_are_packed_as_they_are_or_rounded_to_8_bits(ggml_type: GgmlType) -> None:
    matrix, exact = gguf_matrix(ggml_type)
    found = stored(matrix)
    if ggml_type in CODED and not isinstance(matrix, torch.Tensor):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    else:
        step = exact.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
        assert ((found - exact).abs() <= step * 0.51).all()


def test_codes_have_the_values_of_the_decoded_blocks() -> None:
    types = {GgmlType.Q4_0: AffineGroups, GgmlType.Q4_1: AffineGroups, GgmlType.Q4_K: KGroups, GgmlType.Q6_K: KGroups}
    for ggml_type, kind in types.items():
        matrix, exact = gguf_matrix(ggml_type)
        assert isinstance(matrix, kind)
        values, size = matrix.values(torch.float32), matrix.groups.size
        torch.testing.assert_close(values, exact, rtol=1e-6, atol=1e-6)
        assert torch.equal(matrix.columns(size, 2 * size).values(torch.float32), values[:, size : 2 * size])


@pytest.mark.parametrize("ggml_type", CODED, ids=lambda ggml_type: ggml_type.name)
def test_matrices_are_counted_as_they_are_read(ggml_type: GgmlType) -> None:
    matrix, exact = gguf_matrix(ggml_type)
    counted = coded_like(exact, ggml_type)
    if counted is None:
        assert ggml_type == GgmlType.Q8_0
    else:
        assert not isinstance(matrix, torch.Tensor)
        assert (type(counted), counted.nbytes) == (type(matrix), matrix.nbytes)


@needs_library
def test_amx_gets_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library()
    assert found is not None
    monkeypatch.setattr(found, "instruction_set", "amx")
    for ggml_type, bits in ((GgmlType.Q6_K, 8), (GgmlType.Q4_K, 4)):
        weight = host_weight([gguf_matrix(ggml_type)[0]])
        assert isinstance(weight, HostWeight) and weight.kinds == [f"{bits}-bit, packed"]


@needs_library
@pytest.mark.parametrize("has_zero", [True, False])
def test_integers_of_gptq_and_awq_are_packed_as_they_are(has_zero: bool) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (24, 256), dtype=torch.uint8)
    zero = torch.randint(0, 16, (24, 2), dtype=torch.uint8) if has_zero else None
    scale = (torch.rand(24, 2) * 0.01).half()
    matrix = GroupedIntegers.of(codes, 4, scale, zero, ColumnGroups.regular(256, 128))
    torch.testing.assert_close(stored(matrix), matrix.values(torch.float32), rtol=1e-3, atol=1e-4)


@needs_library
@pytest.mark.parametrize("name", ["int8", "fp8", "bitsandbytes-nf4", "int4"])
def test_weights_that_are_quantized_on_load_are_packed(name: str) -> None:
    torch.manual_seed(0)
    matrix = QUANTIZERS[name](torch.randn(40, 256))
    values = matrix.dense(torch.float32)
    assert relative_error(stored(matrix), values) < 0.01
    if isinstance(matrix, ScaledMatrix) and matrix.numbers.dtype == torch.int8:
        torch.testing.assert_close(stored(matrix), values, rtol=1e-3, atol=1e-5)


@needs_library
def test_matrices_of_several_forms_are_one_product_where_their_blocks_are_whole() -> None:
    torch.manual_seed(0)
    four, exact = gguf_matrix(GgmlType.Q4_1, rows=32)
    dense = torch.randn(24, 96)
    bias = torch.randn(56)
    both, x = torch.cat((exact, rounded_to_8_bits(dense))), torch.randn(3, 96)
    weight = host_weight([four, dense], bias)
    assert isinstance(weight, HostWeight)
    assert relative_error(weight.apply(x), x @ both.t() + bias) < 0.02
    apart = host_weight([dense, four], bias.roll(24))
    assert isinstance(apart, StackedWeight)
    assert relative_error(apart.apply(x), x @ both.roll(24, 0).t() + bias.roll(24)) < 0.02
    order = torch.randperm(56)
    assert relative_error(host_weight([four, dense], bias, order).apply(x), (x @ both.t() + bias)[:, order]) < 0.02


def test_without_the_library_torch_multiplies_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(host, "library", lambda: None)
    dense, bias, x = torch.randn(24, 96), torch.randn(24), torch.randn(5, 96)
    weight = host_weight([dense], bias)
    assert isinstance(weight, TorchInt8Weight)
    assert relative_error(weight.apply(x), x @ dense.t() + bias) < 0.03


@needs_library
@pytest.mark.parametrize("block_size", [16, 8])
def test_blocks_of_any_size_hold_keys_and_values(
    tmp_path: Path, block_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = load(tiny_llama(tmp_path, **SHAPE, initializer_range=0.05))
    sequences = Sequences(on_host(model), [70, 20], block_size)
    expected = Sequences(model, [70, 20]).step({0: 70, 1: 20})
    sequences.step({0: 40})
    assert relative_error(sequences.step({0: 30, 1: 20}), expected) < 0.02
    said = [f"{IN_TORCH}: the KV cache has float16 in blocks of 8 tokens"] if block_size == 8 else []
    assert [message for message in caplog.messages if message.startswith(IN_TORCH)] == said


@needs_library
def test_heads_that_do_not_fit_groups_are_left_to_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = load(tiny_llama(tmp_path, initializer_range=0.05))  # heads of 16
    assert on_host(model) is model and not isinstance(model, HostDecoder)
    assert f"{IN_TORCH}: sizes (16, 96, 128) are not multiples of 32" in caplog.messages
    exact = Sequences(load(tmp_path, packs=False), [30]).step({0: 30})
    assert relative_error(Sequences(model, [30]).step({0: 30}), exact) < 0.1


def test_ids_beyond_the_vocabulary_are_an_error(kernels: Library, tmp_path: Path) -> None:
    host_model = on_host(load(tiny_llama(tmp_path, **SHAPE)))
    sequences = Sequences(host_model, [3])
    sequences.rows[0].input_ids[1] = 320
    with pytest.raises(IndexError):
        sequences.step({0: 3})


@needs_library
@pytest.mark.parametrize(
    ("make", "reason"), [(tiny_gpt2, "GPT2 has its own `embed`"), (tiny_t5, "T5 is not a Decoder")], ids=["gpt2", "t5"]
)
def test_the_log_says_why_the_layers_of_a_family_are_computed_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Path], reason: str
) -> None:
    caplog.set_level("INFO")
    make(tmp_path)
    model = load(tmp_path)
    assert on_host(model) is model
    assert f"{IN_TORCH}: {reason}" in caplog.messages
