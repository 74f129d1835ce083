"""Quantized checkpoints with something wrong: one error that names the tensor or the key, and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import LegatoError, ModelFileError, OptionError, UnsupportedModel
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.server.loading import load
from tests.quantization.checkpoints import base_model, write_twins
from tests.quantization.packers import (
    Layout,
    awq,
    bitsandbytes,
    exl2,
    fp4,
    fp8,
    gptq,
    marlin,
    packed_integers,
    w8a8,
)

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


def error_of(folder: Path, **options: Any) -> LegatoError:
    with pytest.raises(LegatoError) as caught:
        load(ModelFiles.open(folder), ServerOptions(device="cpu", **options))
    assert str(folder) in str(caught.value)
    return caught.value


STATE = rf"{Q}\.weight\.quant_state\.bitsandbytes__nf4"


def set_state(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | changes
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def keep_half(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()


TENSORS: dict[str, tuple[Layout, Change, str]] = {
    "gptq without scales": (
        gptq(), lambda t: t.pop(f"{Q}.scales"), rf"the checkpoint has no tensor '{Q}\.scales'"),
    "gptq without zeros": (
        gptq(), lambda t: t.pop(f"{Q}.qzeros"), rf"the checkpoint has no tensor '{Q}\.qzeros'"),
    "gptq of half the inputs": (
        gptq(), lambda t: keep_half(t, f"{Q}.qweight"),
        rf"model\.safetensors: tensor '{Q}\.qweight' has shape \(8, 128\), the configuration says \(16, 128\)"),
    "gptq with a group that is not there": (
        gptq(desc_act=True), lambda t: t[f"{DOWN}.g_idx"].__setitem__(7, 9),
        rf"model\.safetensors: tensor '{DOWN}\.g_idx' refers to groups beyond the last of 3"),
    "gptq in another type": (
        gptq(), lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}),
        rf"model\.safetensors: tensor '{Q}\.qweight' has type torch\.int64, not int32"),
    "a tensor too many": (
        gptq(), lambda t: t.update({f"{Q}.extra": torch.zeros(1)}),
        rf"the checkpoint has tensors that the model does not: {Q}\.extra"),
    "awq without scales": (
        awq(), lambda t: t.pop(f"{Q}.scales"), rf"the checkpoint has no tensor '{Q}\.scales'"),
    "fp8 without a scale": (
        fp8(), lambda t: t.pop(f"{DOWN}.weight_scale"),
        rf"model\.safetensors: tensor '{DOWN}\.weight' has no scale: .* '{DOWN}\.weight_scale'"),
    "fp8 with scales of another size": (
        fp8("row"), lambda t: keep_half(t, f"{Q}.weight_scale"),
        rf"tensor '{Q}\.weight_scale' has shape \(64, 1\); expected one scale, or one for each of 128 outputs"),
    "packed with groups that do not divide": (
        packed_integers(), lambda t: t.update({f"{Q}.weight_scale": torch.ones(128, 3)}),
        rf"tensor '{Q}\.weight_scale' has 3 groups, which do not divide 128 inputs"),
    "bnb without its state": (
        bitsandbytes(), lambda t: t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4"),
        rf"tensor '{Q}\.weight' is quantized, but has neither 'SCB' nor a 'quant_state'"),
    "bnb with bytes missing": (
        bitsandbytes(), lambda t: keep_half(t, f"{Q}.weight"),
        rf"tensor '{Q}\.weight' has 4096 bytes, 8192 expected"),
    "bnb with a state that is no JSON": (
        bitsandbytes(), lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
        rf"tensor '{Q}\.weight\.quant_state\.bitsandbytes__nf4' is not valid JSON"),
    "bnb with blocks of no size": (
        bitsandbytes(), lambda t: set_state(t, blocksize=0),
        rf"tensor '{STATE}' has 0 as 'blocksize'; expected a positive number"),
    "bnb with blocks of a size that is no number": (
        bitsandbytes(), lambda t: set_state(t, blocksize="many"),
        rf"tensor '{STATE}' has 'many' as 'blocksize'; expected a positive number"),
    "bnb with an offset that is no number": (
        bitsandbytes(double=True), lambda t: set_state(t, nested_offset=None),
        rf"tensor '{STATE}' has None as 'nested_offset'; expected a number"),
    "bnb without scales of its scales": (
        bitsandbytes(double=True), lambda t: t.pop(f"{Q}.weight.nested_absmax"),
        rf"the checkpoint has no tensor '{Q}\.weight\.nested_absmax'"),
    "bnb of 8 bits with scales missing": (
        bitsandbytes("int8"), lambda t: keep_half(t, f"{Q}.SCB"),
        rf"tensor '{Q}\.SCB' has shape \(64,\), the configuration says \(128,\)"),
    "w8a8 without a scale": (
        w8a8(), lambda t: t.pop(f"{Q}.weight_scale"), rf"tensor '{Q}\.weight' has no scale"),
    "w8a8 with too few zeros": (
        w8a8(), lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(64, 1, dtype=torch.int8)}),
        rf"tensor '{Q}\.weight_zero_point' has type torch\.int8 and shape \(64, 1\)"),
    "packed without scales": (
        packed_integers(), lambda t: t.pop(f"{Q}.weight_scale"),
        rf"the checkpoint has no tensor '{Q}\.weight_scale'"),
    "packed with zeros of another size": (
        packed_integers(sym=False), lambda t: keep_half(t, f"{Q}.weight_zero_point"),
        rf"tensor '{Q}\.weight_zero_point' has shape \(8, 2\), \(16, 2\) expected"),
    "packed with a group that is not there": (
        packed_integers(act_ordered=True), lambda t: t[f"{Q}.weight_g_idx"].__setitem__(7, 2),
        rf"tensor '{Q}\.weight_g_idx' refers to groups beyond the last of 2"),
    "packed in another type": (
        packed_integers(), lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].float()}),
        rf"tensor '{Q}\.weight_packed' has type torch\.float32, not int32"),
    "nvfp4 without the scale of the matrix": (
        fp4("nvfp4"), lambda t: t.pop(f"{Q}.weight_global_scale"),
        rf"the checkpoint has no tensor '{Q}\.weight_global_scale'"),
    "mxfp4 with scales of half the inputs": (
        fp4("mxfp4"), lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].clone()}),
        rf"tensor '{Q}\.weight_scale' has shape \(128, 2\), the configuration says \(128, 4\)"),
    "mxfp4 with scales that are no exponents": (
        fp4("mxfp4"), lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].float()}),
        rf"tensor '{Q}\.weight_scale' has type torch\.float32, not uint8"),
    "exl2 without its groups": (
        exl2(), lambda t: t.pop(f"{Q}.q_groups"), rf"the checkpoint has no tensor '{Q}\.q_groups'"),
    "exl2 with a group of no bits": (
        exl2(), lambda t: t[f"{Q}.q_groups"].__setitem__(0, 0), rf"tensor '{Q}\.q_groups' has group 0 with 0 bits"),
    "exl2 with a group of 7 bits": (
        exl2(), lambda t: t[f"{Q}.q_groups"].__setitem__(0, 7), rf"tensor '{Q}\.q_groups' has group 0 with 7 bits"),
    "exl2 with groups in disorder": (
        exl2(), lambda t: t[f"{Q}.q_groups"].__setitem__(3, 0), rf"tensor '{Q}\.q_groups' has group 0 with"),
    "exl2 with an input twice": (
        exl2(), lambda t: t[f"{Q}.q_invperm"].__setitem__(0, int(t[f"{Q}.q_invperm"][1])),
        rf"tensor '{Q}\.q_invperm' is not an order of 128 inputs"),
    "marlin without scales": (
        marlin(), lambda t: t.pop(f"{Q}.s"), rf"the checkpoint has no tensor '{Q}\.s'"),
    "marlin in another type": (
        marlin(), lambda t: t.update({f"{Q}.B": t[f"{Q}.B"].float()}),
        rf"tensor '{Q}\.B' has type torch\.float32, not int32"),
    "awq gemv without zeros": (
        awq("gemv"), lambda t: t.pop(f"{Q}.qzeros"), rf"the checkpoint has no tensor '{Q}\.qzeros'"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_bad_tensor_is_named(case: str, base: Path, tmp_path: Path) -> None:
    layout, change, expected = TENSORS[case]
    folder, _ = write_twins(base, tmp_path, layout)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    error = error_of(folder)
    assert isinstance(error, ModelFileError)
    check(expected, str(error))


def check(expected: str, text: str) -> None:
    assert re.search(expected, text), text


WHERE = r"config\.json, quantization_config"
CONFIGS: dict[str, tuple[Layout, dict[str, Any], type[LegatoError], str]] = {
    "wrong group size": (
        gptq(), {"group_size": 32}, ModelFileError,
        rf"tensor '{Q}\.scales' has 2 groups; a group size of 32 makes 4"),
    "wrong group size of awq": (
        awq(), {"group_size": 32}, ModelFileError, rf"'{Q}\.scales' has shape \(2, 128\), .* says \(4, 128\)"),
    "a group size that does not divide": (
        awq(), {"group_size": 48}, ModelFileError,
        fr"tensor '{Q}\.qweight' has 128 inputs, which is not a multiple of group size 48"),
    "wrong bits": (
        gptq(), {"bits": 8}, ModelFileError, rf"tensor '{Q}\.qweight' has shape \(16, 128\), .* says \(32, 128\)"),
    "bits that nobody has": (
        gptq(), {"bits": 5}, UnsupportedModel, rf"{WHERE}: GPTQ with 5 bits is not supported; supported: 2, 3, 4, 8"),
    "bits that are no number": (gptq(), {"bits": "four"}, ModelFileError, rf"{WHERE}: 'bits' is 'four', not a number"),
    "a group size of zero": (
        gptq(), {"group_size": 0}, ModelFileError, rf"{WHERE}: 'group_size' is 0, not a positive number or -1"),
    "unknown method": (
        gptq(), {"quant_method": "aqlm"}, UnsupportedModel, rf"{WHERE}: quant_method 'aqlm' is not supported; .*gptq"),
    "no method": (gptq(), {"quant_method": None}, UnsupportedModel, rf"{WHERE}: quant_method 'unknown'"),
    "unknown layout": (
        gptq(), {"checkpoint_format": "bitblas"}, UnsupportedModel, rf"{WHERE}: checkpoint_format 'bitblas' is not"),
    "awq of llm-awq": (
        awq(), {"version": "gemv_fast"}, UnsupportedModel, rf"{WHERE}: AWQ version 'gemv_fast' is not supported"),
    "sparse compressed-tensors": (
        packed_integers(), {"format": "marlin-24"}, UnsupportedModel,
        rf"{WHERE}, config_groups, group_0: format 'marlin-24' is not supported; supported: pack-quantized"),
    "compressed-tensors without groups": (
        packed_integers(), {"config_groups": {}}, ModelFileError, rf"{WHERE} has no 'config_groups'"),
    "blocks of another size": (
        fp8("block"), {"weight_block_size": [64, 64]}, ModelFileError,
        rf"tensor '{Q}\.weight_scale_inv' has shape \(4, 2\); blocks of 64 x 64 make \(2, 2\)"),
    "awq of 8 bits": (awq(), {"bits": 8}, UnsupportedModel, rf"{WHERE}: AWQ with 8 bits is not supported"),
    "marlin of 8 bits": (
        marlin(method="marlin"), {"bits": 8}, UnsupportedModel,
        rf"{WHERE}: Marlin files with 8 bits are not supported"),
    "sparse marlin": (
        marlin(method="marlin"), {"checkpoint_format": "marlin_24"}, UnsupportedModel,
        rf"{WHERE}: sparse Marlin files \('marlin_24'\) are not supported"),
    "unknown algorithm of modelopt": (
        fp4("modelopt"), {"quant_algo": "W4A8_AWQ"}, UnsupportedModel,
        rf"{WHERE}: quant_algo 'W4A8_AWQ' is not supported; supported: FP8, .*NVFP4"),
    "packed with bits that nobody has": (
        packed_integers(), {"config_groups": {"group_0": {"weights": {"num_bits": 12}}}}, UnsupportedModel,
        rf"{WHERE}, config_groups, group_0, weights: 'pack-quantized' with 12 bits is not supported"),
    "a pattern that is no regular expression": (
        gptq(), {"dynamic": {"+:.*q_proj(": {"bits": 8}}}, ModelFileError,
        rf"{WHERE}, dynamic: '\.\*q_proj\(' is not a regular expression: "),
    "bits that nobody has in some modules": (
        gptq(), {"dynamic": {".*q_proj": {"bits": 5}}}, UnsupportedModel,
        rf"{WHERE}, dynamic, \.\*q_proj: GPTQ with 5 bits is not supported"),
    "a target that is no regular expression": (
        packed_integers(), {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
        ModelFileError, rf"{WHERE}, config_groups, group_0: '\(' is not a regular expression: "),
    "blocks that are none": (
        fp8("block"), {"weight_block_size": [0]}, ModelFileError, rf"{WHERE}: 'weight_block_size' is \[0\], not two"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_key_is_named(case: str, base: Path, tmp_path: Path) -> None:
    layout, changes, kind, expected = CONFIGS[case]
    folder, _ = write_twins(base, tmp_path, layout)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    error = error_of(folder)
    assert type(error) is kind
    check(expected, str(error))


def test_a_checkpoint_says_its_method_in_one_way_only(base: Path, tmp_path: Path) -> None:
    folder, _ = write_twins(base, tmp_path, gptq())
    error = error_of(folder, quantize="awq")
    assert isinstance(error, OptionError)
    check(
        r"--quantize awq: config\.json, quantization_config of .* says .* 'gptq' already; omit the option", str(error)
    )
    assert isinstance(error_of(folder, quantize="bitsandbytes-nf4"), OptionError)
    load(ModelFiles.open(folder), ServerOptions(device="cpu", quantize="gptq"))
    load(ModelFiles.open(folder), ServerOptions(device="cpu", quantize="marlin"))  # TGI's name for faster kernels


@pytest.mark.parametrize("name", ["gptq", "awq", "exl2", "marlin", "compressed-tensors"])
def test_a_dense_checkpoint_is_not_of_a_method(name: str, base: Path) -> None:
    with pytest.raises(OptionError, match=rf"--quantize {name}: .*not quantized.*on load with bitsandbytes"):
        load(ModelFiles.open(base), ServerOptions(device="cpu", quantize=name))


def test_eight_bit_numbers_without_a_configuration_are_not_taken_for_dense_ones(base: Path, tmp_path: Path) -> None:
    folder, _ = write_twins(base, tmp_path, fp8())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    check(r"tensor '.*' has type torch\.float8_e4m3fn; expected float32, float16 or bfloat16", str(error_of(folder)))


def test_a_bias_of_zeros_that_the_model_does_not_have_is_ignored(base: Path, tmp_path: Path) -> None:
    folder, _ = write_twins(base, tmp_path, gptq())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{Q}.bias": torch.zeros(128)}, folder / "model.safetensors")
    load(ModelFiles.open(folder), ServerOptions(device="cpu"))
    save_file({**tensors, f"{Q}.bias": torch.ones(128)}, folder / "model.safetensors")
    check(rf"has tensors that the model does not: {Q}\.bias", str(error_of(folder)))
