"""What `text-generation-server quantize` writes, in transformers with GPTQModel: the same logits as in Legato."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from legato.quantization.gptq import GptqOptions
from legato.server.quantizing.command import quantize_model
from tests.models.answers import prompts, step_logits
from tests.quantization.checkpoints import SIZES
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")
# GPTQModel has no kernel for a group of 192.
SHAPE = {**SIZES, "intermediate_size": 256}
OPTIONS = {
    "4 bits": GptqOptions(4, 64),
    "4 bits, symmetric": GptqOptions(4, 64, sym=True),
    "4 bits, act-order": GptqOptions(4, 32, act_order=True),
    "8 bits, one group": GptqOptions(8, -1),
    "3 bits, one group": GptqOptions(3, -1),
    "8 bits": GptqOptions(8, 64),
    "3 bits": GptqOptions(3, 64),
    "2 bits": GptqOptions(2, 32),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    base, out = ModelFiles.open(tiny_llama(tmp_path / "base", **SHAPE)), tmp_path / "quantized"
    with torch.inference_mode():
        quantize_model(base, out, OPTIONS[name], [ids for ids in prompts(320) if len(ids) > 10], CPU)
    files, ids = ModelFiles.open(out), prompts(320)[2:5]
    ours, dense = (
        torch.cat(step_logits(get_model(each, ModelConfig.from_hf(each.config()), torch.float32, CPU), ids))
        for each in (files, base)
    )
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, device_map="cpu").eval()
    assert any("Linear" in type(module).__name__ and hasattr(module, "qweight") for module in model.modules())
    with torch.inference_mode():
        theirs = torch.cat([model(torch.tensor([each])).logits[0].float() for each in ids])
    error = float((ours - theirs).norm() / theirs.norm())
    # GPTQModel multiplies in 16 bits.
    assert error < 2e-3 < float((ours - dense).norm() / dense.norm())
