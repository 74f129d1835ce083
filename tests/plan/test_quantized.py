"""`legato plan` of quantized models: what it counts is what is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.common.errors import OptionError
from legato.cpu.library import library
from legato.layers.linear import PackedEmbedding
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import SHAPES
from legato.models.config import ModelConfig
from legato.models.llama import Llama
from legato.models.registry import get_model
from legato.plan.cli import PlanOptions, command_for, make_plan
from legato.plan.counting import CountedModel
from legato.quantization import method
from legato.quantization.on_load import QUANTIZERS
from tests.quantization.checkpoints import base_model, write_twins
from tests.quantization.kept import kept_quantized
from tests.quantization.packers import Layout, awq, bitsandbytes, exl2, fp4, fp8, gptq, marlin, packed_integers

LAYOUTS: dict[str, Layout] = {
    "gptq": gptq(sym=False),
    "gptq-3-bit": gptq(3, sym=False, group=32),
    "gptq-act-order": gptq(sym=False, desc_act=True),
    "awq": awq(),
    "awq-gemv": awq("gemv"),
    "w4a16": packed_integers(),
    "fp8": fp8(),
    "fp8-block": fp8("block"),
    "bnb-nf4": bitsandbytes(double=True),
    "bnb-int8": bitsandbytes("int8"),
    "mxfp4": fp4(),
    "marlin": marlin(),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


def loaded_bytes(folder: Path, shard: Shard, quantize: str | None = None, packs: bool = False) -> int:
    """Of the tensors that a model holds."""
    files = ModelFiles.open(folder)
    config = ModelConfig.from_hf(files.config())
    with kept_quantized():
        model = get_model(
            files, config, torch.float32, torch.device("cpu"), shard=shard, quantize=quantize, packs=packs
        )
    assert isinstance(model, Llama)
    if packs:
        assert isinstance(model.embedding, PackedEmbedding)
        table = model.embedding.packed
    else:
        table = model.embedding.weight
    weights = [model.head.weight, *(linear.weight for layer in model.layers for linear in linears(layer))]
    norms = [norm.weight for layer in model.layers for norm in (layer.norm, layer.mlp_norm)] + [model.norm.weight]
    return table.nbytes + sum(part.nbytes for part in [*weights, *norms])


def linears(layer) -> list:
    return [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quantized_checkpoint(name: str, num_shards: int, base: Path, tmp_path: Path) -> None:
    folder, _ = write_twins(base, tmp_path, LAYOUTS[name])
    files = ModelFiles.open(folder)
    counted = CountedModel(files.config(), "float32", files).shard_size(num_shards).weights
    loaded = loaded_bytes(folder, Shard(num_shards - 1, num_shards))
    # Groups that a shard's border cuts have an index, whose size depends on the numbers.
    assert counted == pytest.approx(loaded, rel=0.03 if num_shards > 1 or "act-order" in name else 0)


def test_widths_that_only_the_tensors_know_are_estimated(base: Path, tmp_path: Path) -> None:
    folder, _ = write_twins(base, tmp_path, exl2())
    files = ModelFiles.open(folder)
    counted = CountedModel(files.config(), "float32", files).shard_size(1).weights
    assert counted == pytest.approx(loaded_bytes(folder, Shard()), rel=0.3)


@pytest.mark.parametrize("small", [0, method.SMALL_PRODUCT])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_weights_quantized_on_load(name: str, small: int, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "SMALL_PRODUCT", small)
    files = ModelFiles.open(base)
    counted = CountedModel(files.config(), "float32", files, name).shard_size(1).weights
    assert counted == pytest.approx(loaded_bytes(base, Shard(), name), rel=0.001)
    assert counted < CountedModel(files.config(), "float32", files).shard_size(1).weights


def test_a_shape_in_four_bits() -> None:
    """Llama 8B: 6.98 billion numbers in matrices, 4 bits and 3 bytes for each group of 128; 1.05 billion in 16 bits."""
    size = CountedModel(SHAPES["llama-8b"], "bfloat16", quantize="int4").shard_size(1).weights
    assert size == pytest.approx(6.98e9 * (0.5 + 3 / 128) + 1.05e9 * 2, rel=0.001)


def test_experts_are_counted_quantized() -> None:
    dense = CountedModel(SHAPES["mixtral-8x7b"], "bfloat16").shard_size(1).weights
    assert CountedModel(SHAPES["mixtral-8x7b"], "bfloat16", quantize="int8").shard_size(1).weights < 0.52 * dense


def test_the_command_has_the_method(base: Path) -> None:
    options = PlanOptions(model_id=str(base), memory="1GiB", quantize="int8")
    assert "--quantize int8" in str(command_for(make_plan(options), options))
    with pytest.raises(OptionError, match="--quantize awq"):
        make_plan(PlanOptions(model_id=str(base), memory="1GiB", quantize="awq"))


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("layout", [gptq(), awq()], ids=["gptq", "awq"])
def test_on_a_cpu_matrices_are_packed(layout: Layout, base: Path, tmp_path: Path) -> None:
    for folder in write_twins(base, tmp_path, layout):
        files = ModelFiles.open(folder)
        counted = CountedModel(files.config(), "float32", files, device_kind="cpu", packs=True).shard_size(1)
        assert counted.weights == loaded_bytes(folder, Shard(), packs=True)
        assert counted.kv_dtype == "float16"


def test_on_a_cpu_matrices_become_dense(base: Path, tmp_path: Path) -> None:
    folder, dense = write_twins(base, tmp_path, gptq())
    files, twin = ModelFiles.open(folder), ModelFiles.open(dense)
    counted = CountedModel(files.config(), "float32", files, device_kind="cpu").shard_size(1)
    assert counted == CountedModel(twin.config(), "float32", twin).shard_size(1)
    on_load = CountedModel(twin.config(), "float32", twin, "int4", device_kind="cpu").shard_size(1)
    assert on_load == counted
