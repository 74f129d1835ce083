"""Every linear layer of every architecture with an adapter: against PEFT, in one shard, in two, and merged.

`make test-lora` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from tests.lora.test_peft import assert_scores, sharded_scores
from tests.lora.tiny_adapters import AdaptedModel, peft_logits, random_prompts, scores_of, train_adapter
from tests.models import tiny_experts as experts
from tests.models import tiny_hybrid as hybrid
from tests.models import tiny_mamba as mamba
from tests.models import tiny_seeds as seeds
from tests.models import tiny_today as today
from tests.models.answers import step_logits
from tests.models.shards import ShardProcesses
from tests.server.local import DEVICE

pytestmark = pytest.mark.lora

MAKERS: dict[str, Callable[..., Path]] = {
    "gpt2": seeds.tiny_gpt2,  # matrices are [in, out]
    "mixtral": experts.tiny_mixtral,  # PEFT's experts are fused, the checkpoint's are not
    "gptj": seeds.tiny_gptj,  # rows of q and k are reordered
    "bloom": seeds.tiny_bloom,
    "deepseek": experts.tiny_deepseek,
    "falcon": seeds.tiny_falcon,
    "gemma2": today.tiny_gemma2,
    "gemma3": today.tiny_gemma3,
    "gpt-neox": seeds.tiny_gpt_neox,
    "granite": today.tiny_granite,
    "mamba": mamba.tiny_mamba,
    "mpt": seeds.tiny_mpt,
    "olmo2": today.tiny_olmo2,
    "opt": seeds.tiny_opt,
    "phi3": today.tiny_phi3,
    "qwen2-moe": experts.tiny_qwen2_moe,
    "qwen3": today.tiny_qwen3,
    "qwen3-moe": experts.tiny_qwen3_moe,
    "qwen3-next": hybrid.tiny_qwen3_next,
    "qwen3-5": hybrid.tiny_qwen3_5,
    "starcoder": seeds.tiny_gpt_bigcode,
    "starcoder2": seeds.tiny_starcoder2,
}
# Where not all linear layers: DeepSeek's router is none of ours, and PEFT refuses the output of Mamba.
MODULES = {
    "deepseek": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mamba": ["in_proj", "x_proj", "dt_proj"],
}
FUSED_EXPERTS = {
    name: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name in ("mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next")
}


@pytest.fixture(scope="module")
def shards() -> Iterator[ShardProcesses]:
    with ShardProcesses() as processes:
        yield processes


@pytest.fixture(scope="module", params=MAKERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of all its linear layers, with the scale of a rank that is no power of two."""
    base = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    adapter = train_adapter(
        base, tmp_path_factory.mktemp("adapter"), r=6, lora_alpha=9,
        target_modules=MODULES.get(request.param, "all-linear"),
        target_parameters=FUSED_EXPERTS.get(request.param), fan_in_fan_out=request.param == "gpt2",
    )  # fmt: skip
    return base, adapter


def test_all_linear_layers_of_an_architecture(case: tuple[Path, Path], shards: ShardProcesses) -> None:
    base, adapter = case
    vocab_size = int(json.loads((base / "config.json").read_text())["vocab_size"])
    prompts = random_prompts(3, vocab_size, longest=24)
    logits = peft_logits(base, adapter, prompts)
    wanted = scores_of(logits, prompts)
    requests: list[tuple[str | None, list[int]]] = [("a", prompt) for prompt in prompts]
    assert_scores(AdaptedModel.load(base, {"a": adapter}).scores(requests), wanted)
    for found in shards.call(sharded_scores, base, {"a": adapter}, requests, world_size=2):
        assert_scores(found, wanted)
    files = ModelFiles.open(adapter)
    merged = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE)
    for mine, theirs in zip(step_logits(merged, prompts), logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)
