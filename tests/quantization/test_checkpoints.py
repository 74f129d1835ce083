"""Every layout of quantized checkpoints, through scheduler and engine: tokens and logits of the dense model with the
same numbers, with one shard and with two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from legato.common.options import ServerOptions
from legato.cpu.library import library
from legato.modelfiles.files import ModelFiles
from legato.models.host import HostDecoder
from legato.server.loading import load
from tests.cpu.test_forward import relative_error
from tests.models.answers import answer, prompts, step_logits
from tests.models.shards import ShardProcesses
from tests.models.tiny_experts import tiny_deepseek, tiny_mixtral, tiny_qwen3_moe
from tests.models.tiny_hybrid import tiny_qwen3_next
from tests.models.tiny_seeds import tiny_gpt2, tiny_gpt_bigcode, tiny_gpt_neox, tiny_gptj
from tests.models.tiny_t5 import tiny_t5
from tests.models.tiny_today import tiny_phi3
from tests.quantization.checkpoints import base_model, write_twins
from tests.quantization.kept import answer_kept
from tests.quantization.packers import (
    Layout,
    awq,
    bitsandbytes,
    exl2,
    fp4,
    fp8,
    gptq,
    gptq_dynamic,
    marlin,
    packed_integers,
    several_groups,
    w8a8,
)

LAYOUTS = {
    "gptq": gptq(),
    "gptq-asymmetric": gptq(sym=False),
    "gptq-v2": gptq(sym=False, v2=True),
    "gptq-act-order": gptq(desc_act=True, sym=False),
    "gptq-one-group": gptq(group=-1),
    "gptq-2-bit": gptq(2, sym=False, group=32),
    "gptq-3-bit": gptq(3, sym=False, group=32),
    "gptq-8-bit": gptq(8),
    "gptq-zero-index": gptq(zero_index=True),
    "gptq-quantize-config": gptq(file="quantize_config.json"),
    "gptq-tensors-of-tgi": gptq(tensors=True, sym=False),
    "gptq-dynamic": gptq_dynamic(),
    "awq": awq(),
    "awq-gemv": awq("gemv"),
    "awq-quant-config": awq(file="quant_config.json"),
    "w4a16": packed_integers(),
    "w4a16-asymmetric": packed_integers(sym=False),
    "w4a16-act-order": packed_integers(act_ordered=True),
    "w3a16": packed_integers(3, sym=False),
    "w8a16": packed_integers(8, group=-1),
    "w8a8": w8a8(),
    "compressed-fp8-static": fp8(method="compressed-tensors", static=True),
    "compressed-fp8-dynamic": fp8("row", method="compressed-tensors"),
    "compressed-fp8-block": fp8("block", method="compressed-tensors"),
    "compressed-several-groups": several_groups(),
    "mxfp4": fp4("mxfp4"),
    "nvfp4": fp4("nvfp4"),
    "fp8": fp8(static=True, kv_scales=True),
    "fp8-block": fp8("block"),
    "fbgemm-fp8": fp8("row", method="fbgemm_fp8"),
    "modelopt-fp8": fp8(method="modelopt", static=True, kv_scales=True),
    "modelopt-fp8-row": fp8("row", method="modelopt"),
    "modelopt-fp8-block": fp8("block", method="modelopt", block=(128, 128)),
    "modelopt-nvfp4": fp4("modelopt"),
    "bnb-nf4": bitsandbytes(),
    "bnb-fp4": bitsandbytes("fp4"),
    "bnb-nf4-double": bitsandbytes(double=True),
    "bnb-nf4-stored-as-bf16": bitsandbytes(storage=torch.bfloat16),
    "bnb-int8": bitsandbytes("int8"),
    "exl2": exl2(),
    "marlin": marlin(),
    "marlin-one-group": marlin(group=-1, method="marlin"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_and_logits_are_those_of_the_dequantized_model(
    name: str, base: Path, tmp_path: Path, shards: ShardProcesses
) -> None:
    quantized, dense = write_twins(base, tmp_path, LAYOUTS[name])
    requests = prompts(320)[2:4]
    expected = answer(dense, requests)
    answers = [answer(quantized, requests), answer_kept(quantized, requests)]
    answers += shards.call(answer_kept, quantized, requests, world_size=2)
    for found in answers:
        assert found.tokens == expected.tokens
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cpu_packs_every_layout(name: str, base: Path, tmp_path: Path) -> None:
    """What the server makes of it by default is as near to the dequantized model as what it makes of that one: what is
    not packed as it is, is rounded to 8 bits, and so are activations."""
    quantized, dense = write_twins(base, tmp_path, LAYOUTS[name])
    model, twin = (load(ModelFiles.open(folder), ServerOptions(device="cpu")).model for folder in (quantized, dense))
    exact = load(ModelFiles.open(dense), ServerOptions(device="cpu", dtype="float32")).model
    assert isinstance(model, HostDecoder) and isinstance(twin, HostDecoder)
    found, rounded, expected = (torch.cat(step_logits(each, prompts(320)[2:5])) for each in (model, twin, exact))
    assert relative_error(found, expected) < 1.5 * relative_error(rounded, expected) < 0.1


FAMILIES: dict[str, tuple[Callable[..., Path], Layout, bool]] = {
    "mixtral-gptq": (partial(tiny_mixtral, intermediate_size=64), gptq(desc_act=True, group=32), False),
    "mixtral-awq": (partial(tiny_mixtral, intermediate_size=64), awq(group=32), False),
    "qwen3-moe-fp8": (tiny_qwen3_moe, fp8("block"), False),
    "qwen3-next-fp8": (tiny_qwen3_next, fp8("block"), False),
    "qwen3-next-gptq": (tiny_qwen3_next, gptq(8, group=-1), False),
    "deepseek-fp8": (tiny_deepseek, fp8("block"), False),
    "deepseek-bnb": (tiny_deepseek, bitsandbytes("int8"), False),
    "gpt2-gptq": (tiny_gpt2, gptq(group=32, sym=False), True),
    "starcoder-gptq": (tiny_gpt_bigcode, gptq(8, group=-1), False),
    "gpt-neox-gptq": (tiny_gpt_neox, gptq(8, group=-1), False),
    "gptj-gptq": (tiny_gptj, gptq(8, group=-1, desc_act=True), False),
    "phi3-awq": (partial(tiny_phi3, intermediate_size=128), awq(group=32), False),
    "t5-bnb": (tiny_t5, bitsandbytes("int8"), False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name: str, tmp_path: Path, shards: ShardProcesses) -> None:
    """Fused and transposed matrices, heads side by side, experts, an encoder."""
    make, layout, transposed = FAMILIES[name]
    make(tmp_path / "base")
    quantized, dense = write_twins(tmp_path / "base", tmp_path, layout, transposed)
    requests = prompts(300)[2:4]
    expected = answer(dense, requests)
    answers = [answer_kept(quantized, requests), *shards.call(answer_kept, quantized, requests, world_size=2)]
    for found in answers:
        assert found.tokens == expected.tokens
