"""Dense weights quantized while they are loaded: codes, errors, and the same tokens however many shards there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from legato.benchmark.cpu.dummy_gguf import write_dummy_gguf
from legato.common.options import ServerOptions
from legato.cpu.library import library
from legato.kernels.device import GpuLimits
from legato.kernels.quantized.linear import kernel_for
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import write_shape
from legato.models.config import ModelConfig
from legato.models.host import HostDecoder
from legato.models.registry import get_model
from legato.quantization import method
from legato.quantization.host import pack
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.operands import operand_of
from legato.quantization.schemes import FP4, NF4, ScaledMatrix, TableCodes
from legato.server.loading import load
from tests.cpu.test_forward import relative_error
from tests.models.answers import answer, prompts, step_logits
from tests.models.shards import ShardProcesses
from tests.models.tiny_experts import tiny_mixtral
from tests.models.tiny_t5 import tiny_t5
from tests.quantization.checkpoints import base_model
from tests.quantization.kept import answer_kept, kept_quantized
from tests.tiny_models import tiny_llama

# Largest root of the mean squared error, in standard deviations of normally distributed weights.
ERRORS = {
    "bitsandbytes": 0.012, "eetq": 0.012, "int8": 0.012, "fp8": 0.03, "int4": 0.11,
    "bitsandbytes-nf4": 0.08, "bitsandbytes-fp4": 0.115,
}  # fmt: skip
MODELS = {
    "llama": base_model,
    # Groups do not divide the sizes, and end elsewhere than the shards' parts do.
    "llama-odd": partial(tiny_llama, hidden_size=96, intermediate_size=136, num_hidden_layers=2, initializer_range=0.1),
    "mixtral": tiny_mixtral,
    "t5": tiny_t5,
}


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_every_method_has_a_bound() -> None:
    assert ERRORS.keys() == QUANTIZERS.keys()


@pytest.mark.parametrize("shape", [(48, 256), (7, 200), (2, 64), (300, 4096)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_error_is_that_of_the_format(name: str, shape: tuple[int, int]) -> None:
    matrix = weights(*shape)
    matrix[0] = 0  # a row without a scale
    quantized = QUANTIZERS[name](matrix)
    assert (quantized.out_features, quantized.in_features) == shape
    error = (quantized.dense(torch.float64) - matrix).square().mean().sqrt() / matrix.std()
    assert error < ERRORS[name]
    assert not quantized.dense(torch.float32)[0].any()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_product_is_that_of_the_dequantized_matrix(name: str) -> None:
    quantized, x = QUANTIZERS[name](weights(70, 200)), weights(5, 200)
    expected = x.double() @ quantized.dense(torch.float64).T
    torch.testing.assert_close(quantized.multiply(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("columns", [(0, 200), (0, 128), (128, 200), (50, 131), (199, 200)])
def test_some_columns_are_those_of_the_whole_matrix(name: str, columns: tuple[int, int]) -> None:
    quantized = QUANTIZERS[name](weights(9, 200))
    part = quantized.columns(*columns)
    assert torch.equal(part.dense(torch.float32), quantized.dense(torch.float32)[:, slice(*columns)])
    assert part.nbytes <= quantized.nbytes


def test_an_int8_row_is_scaled_by_its_largest_number() -> None:
    quantized = QUANTIZERS["int8"](torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 254.0]]))
    assert isinstance(quantized, ScaledMatrix)
    assert quantized.numbers.tolist() == [[64, -127, 32], [0, 0, 127]]
    assert quantized.scale.flatten().tolist() == pytest.approx([2 / 127, 2.0])


def test_eetq_has_the_numbers_of_int8_and_no_kernel_that_rounds_activations() -> None:
    matrix = weights(40, 256)
    matrix[3] = 0
    ours, int8 = QUANTIZERS["eetq"](matrix), QUANTIZERS["int8"](matrix)
    assert torch.equal(ours.dense(torch.float32), int8.dense(torch.float32))
    operands, limits = (operand_of(ours), operand_of(int8)), GpuLimits(90, 232448)
    assert all(operand is not None for operand in operands)
    assert [kernel_for(256, operand, limits) for operand in operands if operand is not None] == ["16-bit", "int8"]
    assert [kernel_for(2048, operand, limits) for operand in operands if operand is not None] == ["unpacked", "int8"]
    assert torch.equal(pack(ours).data, pack(int8).data)


@pytest.mark.parametrize(("name", "table"), [("bitsandbytes-nf4", NF4), ("bitsandbytes-fp4", FP4)])
def test_numbers_of_the_table_keep_their_codes(name: str, table: tuple[float, ...]) -> None:
    matrix = torch.tensor(table).repeat(3, 4) * torch.tensor([[1.0], [0.25], [3.0]])
    quantized = QUANTIZERS[name](matrix)
    assert isinstance(quantized, TableCodes)
    torch.testing.assert_close(quantized.dense(torch.float32), matrix)


@pytest.mark.parametrize(("name", "table"), [("bitsandbytes-nf4", NF4), ("bitsandbytes-fp4", FP4)])
def test_no_group_of_a_table_is_worse_than_scaled_by_its_largest_number(name: str, table: tuple[float, ...]) -> None:
    groups = weights(40, 32 * 8).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    numbers = torch.tensor(table)
    nearest = numbers[(groups[..., None] / largest[..., None] - numbers).abs().argmin(3)] * largest
    found = QUANTIZERS[name](groups.flatten(1)).dense(torch.float32).unflatten(1, (-1, 32))
    expected, errors = ((each - groups).square().sum(2) for each in (nearest, found))
    assert bool((errors <= expected * (1 + 1e-4)).all())
    assert errors.mean() < 0.9 * expected.mean()


def test_the_table_of_nf4_is_turned_round_where_that_is_nearer() -> None:
    matrix = -torch.tensor(NF4).repeat(2, 2)
    quantized = QUANTIZERS["bitsandbytes-nf4"](matrix)
    assert isinstance(quantized, TableCodes)
    assert quantized.scale.flatten().tolist() == [-1.0, -1.0]
    torch.testing.assert_close(quantized.dense(torch.float32), matrix)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e-44])
def test_a_broken_number_spoils_only_its_group(number: float) -> None:
    matrix = weights(2, 64)
    intact = QUANTIZERS["bitsandbytes-nf4"](matrix).dense(torch.float32)[:, 32:]
    matrix[:, :32] = 0
    matrix[0, 3] = number
    found = QUANTIZERS["bitsandbytes-nf4"](matrix).dense(torch.float32)
    assert torch.equal(found[:, 32:], intact)
    assert bool(found[0, :32].isfinite().all()) == (number < 1)


INT8, NF4_GROUPS = "int8, scale by row: dequantized on load", "nf4, groups of 32: dequantized on load"


def layers_of(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """As the log counts them."""
    with caplog.at_level("INFO"):
        load(ModelFiles.open(folder), ServerOptions(device="cpu", dtype="float32", quantize=name))
    (record,) = [record for record in caplog.records if record.message == "Quantized weights"]
    return record.fields["layers"]


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("llama", {INT8: 2 * 4 + 3, NF4_GROUPS: 3}),
        ("mixtral", {INT8: 3 * 4, NF4_GROUPS: 3 * 3 * 5}),
        # The last one is counted in the encoder, which has two layers; published decoders have as many.
        ("t5", {INT8: 2 * 4 + 3 * 8 + 2 * 2, NF4_GROUPS: (1 + 2) * 2}),
    ],
)
def test_attention_and_the_last_layer_have_8_bits_beside_tables(
    model: str, layers: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MODELS[model](tmp_path)
    assert layers_of(tmp_path, "bitsandbytes-nf4", caplog) == layers


FP8, INT4 = "fp8, scale by row: dequantized on load", "4-bit integers, groups of {}: dequantized on load"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("fp8", {INT8: 2 * 5, FP8: 2 * 2}),
        ("bitsandbytes-nf4", {INT8: 2 * 5 + 2, NF4_GROUPS: 2}),
        (
            "int4",
            {
                f"4-bit integers, groups of {size}: dequantized on load": 2 * count
                for size, count in ((64, 6), (128, 1))
            },
        ),
    ],
)
def test_products_of_few_weights_are_int8(
    name: str, layers: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one product stacks counts together: down has as many weights as queries, keys and values, gate and up have
    twice as many."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    tiny_llama(tmp_path, num_hidden_layers=2, **sizes)
    monkeypatch.setattr(method, "SMALL_PRODUCT", 64 * 128 + 1)
    assert layers_of(tmp_path, name, caplog) == layers


def test_each_shard_counts_the_weights_of_the_whole_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(method, "SMALL_PRODUCT", 64 * 256)  # gate and up together, of which a shard has half
    files = ModelFiles.open(tmp_path)
    config = ModelConfig.from_hf(files.config())
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        with kept_quantized():
            model = get_model(files, config, torch.float32, torch.device("cpu"), shard=shard, quantize="fp8")
        found = [layer.mlp.gate_up.weight.matrix.kind for layer in model.layers]
        assert found == ["fp8, scale by row"] * 3


def test_experts_are_never_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are many."""
    tiny_mixtral(tmp_path)
    monkeypatch.setattr(method, "SMALL_PRODUCT", 1 << 21)
    assert layers_of(tmp_path, "fp8", caplog) == {INT8: 3 * 4, FP8: 3 * 3 * 5}


# One method of each kind for every model, and every method for a model, for experts, and for an encoder.
CASES = [("llama", "int8"), ("llama", "int4")]
CASES += [(model, name) for model in ("llama-odd", "mixtral", "t5") for name in QUANTIZERS]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_two_shards_give_the_tokens_of_one(name: str, model: str, tmp_path: Path, shards: ShardProcesses) -> None:
    MODELS[model](tmp_path)
    requests = prompts(300)[2:4]
    expected = answer(tmp_path, requests, quantize=name)
    answers = shards.call(partial(answer_kept, quantize=name), tmp_path, requests, world_size=2)
    for found in [answer_kept(tmp_path, requests, quantize=name), *answers]:
        assert found.tokens == expected.tokens
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert answer(tmp_path, requests).tokens != expected.tokens


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_cpu_packs_every_method(name: str, tmp_path: Path) -> None:
    """As the server does by default: the logits are as near to those of the dequantized matrices as without a method
    to those of the dense ones, and are others."""
    files = ModelFiles.open(base_model(tmp_path))
    asked = [(method, dtype) for method in (name, None) for dtype in (None, "float32")]
    models = [load(files, ServerOptions(device="cpu", quantize=method, dtype=dtype)).model for method, dtype in asked]
    assert isinstance(models[0], HostDecoder)
    found, expected, rounded, dense = (torch.cat(step_logits(each, prompts(320)[2:5])) for each in models)
    assert relative_error(found, expected) < 1.5 * relative_error(rounded, dense) < 0.1
    assert not torch.equal(found, rounded)


def test_the_log_says_the_method_and_what_multiplies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base_model(tmp_path)
    with caplog.at_level("INFO"), kept_quantized():
        load(ModelFiles.open(tmp_path), ServerOptions(device="cpu", dtype="float32", quantize="bitsandbytes-nf4"))
    (record,) = [record for record in caplog.records if record.message == "Quantized weights"]
    assert record.fields["method"] == "bitsandbytes-nf4"
    assert record.fields["layers"] == {"int8, scale by row: torch": 6, "nf4, groups of 32: torch": 2}
    caplog.clear()
    with caplog.at_level("INFO"):
        load(ModelFiles.open(tmp_path), ServerOptions(device="cpu", dtype="float32", quantize="bitsandbytes-nf4"))
    (record,) = [record for record in caplog.records if record.message == "Quantized weights"]
    assert record.fields["layers"] == {
        "int8, scale by row: dequantized on load": 11,
        "nf4, groups of 32: dequantized on load": 3,
    }


@pytest.mark.parametrize("name", QUANTIZERS)
def test_dummy_weights_are_quantized_too(name: str, tmp_path: Path) -> None:
    options = ServerOptions(device="cpu", dtype="float32", load_format="dummy", quantize=name)
    with kept_quantized():
        model = load(ModelFiles.open(write_shape("tiny", tmp_path)), options).model
    assert "Quantized" in type(model.layers[0].mlp.down.weight).__name__


def test_a_gguf_file_is_quantized_as_asked_and_stays_as_it_is_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ModelFiles.open(write_dummy_gguf("tiny", tmp_path / "tiny"))
    for asked, expected in ((None, "gguf"), ("bitsandbytes-nf4", "bitsandbytes-nf4")):
        caplog.clear()
        with caplog.at_level("INFO"):
            load(files, ServerOptions(device="cpu", quantize=asked))
        records = [record for record in caplog.records if record.message == "Quantized weights"]
        assert [record.fields["method"] for record in records] == [expected]


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
def test_the_packed_embedding_of_a_cpu_is_not_quantized(tmp_path: Path) -> None:
    files, ids = ModelFiles.open(base_model(tmp_path)), torch.arange(300)
    dense, quantized = (
        load(files, ServerOptions(device="cpu", quantize=name)).model for name in (None, "bitsandbytes-nf4")
    )
    assert isinstance(dense, HostDecoder) and isinstance(quantized, HostDecoder)
    assert torch.equal(dense._model.embedding(ids), quantized._model.embedding(ids))
    assert torch.equal(
        dense._model.head(dense._model.embedding(ids)), quantized._model.head(dense._model.embedding(ids))
    )
