"""GGUF blocks as operands of kernels: the numbers of the `gguf` package, in every type, and through a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles, read_json
from legato.modelfiles.gguf.file import GgmlType
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from legato.plan.counting import CountedModel
from legato.quantization.gguf import dequantize
from legato.quantization.gguf_forms import FORMS, packed_matrix
from legato.quantization.operands import operand_of
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix
from legato.quantization.weight import StackedWeight, weight_of
from tests.models.answers import answer, prompts
from tests.models.shards import ShardProcesses
from tests.models.test_gguf_families import _write_sizes, _write_tokens
from tests.plan.test_quantized import loaded_bytes
from tests.quantization.kept import answer_kept, kept_quantized
from tests.quantization.test_gguf import HALF_SCALES, random_blocks
from tests.tiny_models import tiny_llama

# Whose scales and minima are in the file as they are; those of others are products that float16 rounds.
EXACT = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0)
# Bits of a number in memory, scales and minima of float16 included.
BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 5, "Q5_0": 8.5, "Q5_1": 9, "Q5_K": 9, "Q8_0": 8.5, "Q6_K": 9,
        "Q2_K": 6, "Q3_K": 5}  # fmt: skip
types = pytest.mark.parametrize("ggml_type", FORMS, ids=lambda ggml_type: ggml_type.name)


def blocks_of(ggml_type: GgmlType, rows: int = 6, columns: int = 1024) -> torch.Tensor:
    per_row = columns // ggml_type.block_size
    return torch.from_numpy(random_blocks(ggml_type, rows * per_row).reshape(rows, per_row, -1))


@types
def test_values_are_those_of_the_reference(ggml_type: GgmlType) -> None:
    blocks = blocks_of(ggml_type)
    expected = gguf.quants.dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType(ggml_type))
    matrix = packed_matrix(blocks, ggml_type)
    values = matrix.values(torch.float32).numpy()
    if ggml_type in EXACT:
        np.testing.assert_array_equal(values, expected)
        return
    # A product and a minimum, of which each is rounded by half a unit of float16's eleven bits.
    assert isinstance(matrix, GroupedIntegers | ScaledMatrix)
    added = getattr(matrix, "minimum", None)
    minima = np.zeros_like(values) if added is None else matrix.groups.spread(added.float()).numpy()
    allowed = 2.0**-11 * (np.abs(values - minima) + np.abs(minima)) * 1.01 + 1e-7
    assert (np.abs(values - expected) <= allowed).all()


@types
def test_kernels_know_the_form(ggml_type: GgmlType) -> None:
    matrix = packed_matrix(blocks_of(ggml_type), ggml_type)
    operand = operand_of(matrix)
    assert operand is not None
    torch.testing.assert_close(operand.values(torch.float64), matrix.values(torch.float64))
    assert matrix.nbytes * 8 / (matrix.out_features * matrix.in_features) == BITS[ggml_type.name]


@types
def test_rows_columns_and_stacks(ggml_type: GgmlType) -> None:
    matrix = packed_matrix(blocks_of(ggml_type), ggml_type)
    values = matrix.values(torch.float32)
    assert torch.equal(matrix.columns(96, 544).values(torch.float32), values[:, 96:544])
    assert torch.equal(matrix.take(torch.tensor([4, 1])).values(torch.float32), values[[4, 1]])
    assert torch.equal(matrix.stacked([matrix]).values(torch.float32), torch.cat((values, values)))


def test_neighbours_of_one_type_are_one_product() -> None:
    """As in most files of Q4_K_M: queries and keys have 4 bits, values 6."""
    kinds = (GgmlType.Q4_K, GgmlType.Q4_K, GgmlType.Q6_K)
    matrices = [packed_matrix(blocks_of(kind), kind) for kind in kinds]
    weight = weight_of(matrices)
    assert isinstance(weight, StackedWeight) and [part.out_features for part in weight.weights] == [12, 6]
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([x @ matrix.values(torch.float32).T for matrix in matrices], dim=1)
    torch.testing.assert_close(weight.apply(x), expected, rtol=1e-4, atol=1e-3)


SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    num_hidden_layers=2, initializer_range=0.08,
)  # fmt: skip
# The types of a file: of q, k, gate and up, of v and down, and of the head.
FILES = {
    "Q4_0": ("Q4_0", "Q4_0", "Q8_0"),
    "Q4_1": ("Q4_1", "Q5_1", "F16"),
    "Q5_0": ("Q5_0", "Q5_0", "Q8_0"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K": ("Q5_K", "Q5_K", "Q6_K"),
    "Q3_K": ("Q3_K", "Q2_K", "Q6_K"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"), **SIZES)


def write_gguf(base: Path, path: Path, kinds: tuple[str, str, str]) -> Path:
    """A model with the vocabulary and the norms of `base`, and matrices of random blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_sizes(writer, "llama", read_json(base / "config.json"))
    _write_tokens(writer, base)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, tensor in load_file(base / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1 or "embed" in name:
            writer.add_tensor(theirs, tensor.float().numpy())
            continue
        kind = kinds[2] if "lm_head" in name else kinds[1] if "v_proj" in name or "down_proj" in name else kinds[0]
        number = gguf.GGMLQuantizationType[kind]
        if kind == "F16":
            writer.add_tensor(theirs, tensor.half().numpy())
        else:
            writer.add_tensor(theirs, scaled_blocks(GgmlType[kind], tensor), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaled_blocks(ggml_type: GgmlType, tensor: torch.Tensor) -> np.ndarray:
    """Random blocks [rows, bytes] whose numbers are about as large as those of the tensor."""
    rows, columns = tensor.shape
    blocks = random_blocks(ggml_type, rows * columns // ggml_type.block_size)
    size = float(dequantize(blocks.reshape(-1), ggml_type, (rows, columns)).std())
    for begin in HALF_SCALES[ggml_type]:
        halves = blocks[:, begin : begin + 2].copy().view(np.float16) * np.float16(float(tensor.std()) / size)
        blocks[:, begin : begin + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", FILES)
def test_a_model_answers_as_its_dense_twin(name: str, base: Path, tmp_path: Path, shards: ShardProcesses) -> None:
    file = write_gguf(base, tmp_path / "model.gguf", FILES[name])
    requests = prompts(320)[2:4]
    expected = answer(file, requests)
    # What float16 makes of scales of K types is a part in four thousand of a number, in every layer.
    allowed = 2e-2 if "_K" in name else 1e-3
    for found in [answer_kept(file, requests), *shards.call(answer_kept, file, requests, world_size=2)]:
        assert found.tokens == expected.tokens
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K_M", "Q3_K"])
def test_a_plan_counts_what_is_loaded(name: str, num_shards: int, base: Path, tmp_path: Path) -> None:
    file = write_gguf(base, tmp_path / "model.gguf", FILES[name])
    files = ModelFiles.open(file)
    counted = CountedModel(files.config(), "float32", files).shard_size(num_shards).weights
    assert counted == loaded_bytes(file, Shard(num_shards - 1, num_shards))
    dense = CountedModel(files.config(), "float32", files, device_kind="cpu").shard_size(num_shards).weights
    assert counted < 0.6 * dense


def test_the_log_names_types_that_become_dense(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(base, tmp_path / "model.gguf", FILES["Q4_K_M"])
    monkeypatch.delitem(FORMS, GgmlType.Q6_K)
    files = ModelFiles.open(file)
    config = ModelConfig.from_hf(files.config())
    with kept_quantized(), caplog.at_level("INFO"):
        get_model(files, config, torch.float32, torch.device("cpu"))
    lines = [record for record in caplog.records if record.message == "Dense matrices of the GGUF file"]
    assert [record.fields for record in lines] == [{"types": {"Q6_K": 5}}]
