"""Every layout of quantized checkpoints, through scheduler and engine: tokens and logits of the dense model with the
same numbers, with one shard and with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.answers import answer, prompts
from tests.models.shards import ShardProcesses
from tests.quantization.checkpoints import base_model, write_twins
from tests.quantization.packers import gptq

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
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_and_logits_are_those_of_the_dequantized_model(
    name: str, base: Path, tmp_path: Path, shards: ShardProcesses
) -> None:
    quantized, dense = write_twins(base, tmp_path, LAYOUTS[name])
    requests = prompts(320)[:4]
    expected = answer(dense, requests)
    answers = [answer(quantized, requests), *shards.answer(quantized, requests, 2)]
    for found in answers:
        assert found.tokens == expected.tokens
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
