"""Adapters that PEFT wrote, against what PEFT computes with them: logits to 1e-4, and the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import LegatoError, ModelFileError, UnsupportedModel
from legato.layers.shard import Shard
from legato.quantization.on_load import QUANTIZERS
from tests.lora.tiny_adapters import (
    LINEAR,
    AdaptedModel,
    peft_logits,
    peft_tokens,
    random_prompts,
    scores_of,
    train_adapter,
)
from tests.models import tiny_experts
from tests.models.shards import ShardProcesses

VOCAB = 320


def assert_scores(found: list[list[float]], wanted: list[list[float]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-4, rtol=0)


def check(base: Path, folders: dict[str, Path], vocab_size: int = VOCAB, **how: Any) -> None:
    """All adapters and the base model in one batch."""
    model, prompts = AdaptedModel.load(base, folders, **how), random_prompts(4, vocab_size)
    names: list[str | None] = [None, *folders]
    requests = [(name, prompt) for prompt in prompts for name in names]
    found = dict(zip(map(str, requests), model.scores(requests), strict=True))
    for name in names:
        wanted = scores_of(peft_logits(base, folders.get(name or ""), prompts), prompts)
        assert_scores([found[str((name, prompt))] for prompt in prompts], wanted)


def test_a_batch_of_all_adapters_has_pefts_scores(base: Path, adapters: dict[str, Path]) -> None:
    check(base, adapters)


@pytest.mark.lora
def test_a_batch_of_all_adapters_has_pefts_tokens(base: Path, adapters: dict[str, Path]) -> None:
    """Chunked prompts, decodes and the prefix cache: the same prompts for every adapter, twice."""
    model, prompts = AdaptedModel.load(base, adapters), random_prompts(3, VOCAB, seed=1, longest=60)
    names: list[str | None] = [None, *adapters]
    wanted = {name: peft_tokens(base, adapters.get(name or ""), prompts, 12) for name in names}
    requests = [(name, prompt) for prompt in prompts for name in names]
    expected = [wanted[name][prompts.index(prompt)] for name, prompt in requests]
    assert len({tuple(tokens) for tokens in expected}) > len(prompts), "the adapters must make a difference"
    assert model.tokens(requests + requests, 12, max_rows=len(requests)) == expected + expected
    assert model.tokens(requests, 12, step_tokens=16, max_rows=4, num_blocks=40) == expected, "preempted"


@pytest.mark.lora
def test_more_adapters_than_the_device_holds_take_turns(base: Path, adapters: dict[str, Path]) -> None:
    """Room for one of rank 70, or a few small ones: every request brings its adapter in anew."""
    model, prompts = AdaptedModel.load(base, adapters, device_ranks=72), random_prompts(5, VOCAB, seed=2)
    requests: list[tuple[str | None, list[int]]] = [(name, prompt) for prompt in prompts for name in adapters]
    wanted = {name: peft_tokens(base, folder, prompts, 6) for name, folder in adapters.items()}
    expected = [wanted[str(name)][prompts.index(prompt)] for name, prompt in requests]
    assert model.tokens(requests, 6) == expected


def sharded_scores(
    base: Path, folders: dict[str, Path], requests: list[tuple[str | None, list[int]]], shard: Shard | None = None
) -> list[list[float]]:
    return AdaptedModel.load(base, folders, shard=shard).scores(requests)


@pytest.fixture(scope="module")
def shards() -> Iterator[ShardProcesses]:
    with ShardProcesses() as processes:
        yield processes


@pytest.mark.lora
def test_two_shards_have_pefts_scores(base: Path, adapters: dict[str, Path], shards: ShardProcesses) -> None:
    prompts = random_prompts(3, VOCAB, seed=3)
    requests = [(name, prompt) for prompt in prompts for name in adapters]
    found = shards.call(sharded_scores, base, adapters, requests, world_size=2)
    assert found[0] == found[1]
    for name, folder in adapters.items():
        wanted = scores_of(peft_logits(base, folder, prompts), prompts)
        mine = [scores for scores, (other, _) in zip(found[0], requests, strict=True) if other == name]
        assert_scores(mine, wanted)


# ---- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    folder: Path
    num_experts: int
    hidden: int
    inner: int


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    folder = tiny_experts.tiny_qwen3_moe(tmp_path_factory.mktemp("mixture"))
    config = json.loads((folder / "config.json").read_text())
    num_experts = config.get("num_experts") or config["num_local_experts"]
    return Mixture(folder, num_experts, config["hidden_size"], config["moe_intermediate_size"])


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def fused(mixture: Mixture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused")
    return train_adapter(
        mixture.folder, folder, r=4, target_modules=["q_proj", "gate"], target_parameters=FUSED, lora_dropout=0.0
    )


def vocab_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.mark.lora
def test_fused_experts_are_told_apart_by_their_shapes(mixture: Mixture, fused: Path) -> None:
    check(mixture.folder, {"fused": fused}, vocab_of(mixture.folder))


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "adapter_model.safetensors")
    return target


@pytest.mark.lora
def test_experts_one_by_one_and_in_the_old_orientation_are_the_same(
    mixture: Mixture, fused: Path, tmp_path: Path
) -> None:
    """The same adapter in the three layouts that exist."""
    tensors = load_file(fused / "adapter_model.safetensors")
    single: dict[str, torch.Tensor] = {}
    old: dict[str, torch.Tensor] = {}
    for name, a in tensors.items():
        if "experts" not in name:
            single[name] = old[name] = a
        elif "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            by_expert = a.unflatten(0, (mixture.num_experts, -1))  # [experts, r, in]
            outputs = tensors[other].unflatten(1, (-1, mixture.num_experts)).permute(2, 0, 1)  # [experts, out, r]
            old[name] = outputs.permute(0, 2, 1).flatten(0, 1)
            old[other] = by_expert.permute(2, 1, 0).flatten(1)
            block = name.partition(".experts")[0]
            is_down = a.shape[1] == mixture.inner
            for expert in range(mixture.num_experts):
                parts = {"down_proj": outputs[expert]}
                if not is_down:
                    gate, up = outputs[expert].chunk(2)
                    parts = {"gate_proj": gate, "up_proj": up}
                for part, b in parts.items():
                    module = f"{block}.experts.{expert}.{part}"
                    single[f"{module}.lora_A.weight"] = by_expert[expert]
                    single[f"{module}.lora_B.weight"] = b
    folders = {
        "fused": fused,
        "single": rewritten(fused, tmp_path / "single", single),
        "old": rewritten(fused, tmp_path / "old", old),
    }
    model, prompts = AdaptedModel.load(mixture.folder, folders), random_prompts(3, vocab_of(mixture.folder))
    found = {name: model.scores([(name, prompt) for prompt in prompts]) for name in folders}
    assert_scores(found["single"], found["fused"])
    assert_scores(found["old"], found["fused"])


# ---- quantized bases -------------------------------------------------------------------------------------------------


@pytest.mark.lora
def test_an_adapter_of_a_quantized_base_has_pefts_scores_of_the_dequantized_one(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The oracle's base model has the numbers that the quantized matrices stand for."""
    same = shutil.copytree(base, tmp_path / "dequantized")
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if name.removesuffix(".weight").rpartition(".")[2] in LINEAR:
            tensors[name] = QUANTIZERS["int8"](weight).dense(torch.float32)
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    prompts = random_prompts(2, VOCAB, seed=4)
    model = AdaptedModel.load(base, {"linear": adapters["linear"]}, quantize="int8")
    wanted = scores_of(peft_logits(same, adapters["linear"], prompts), prompts)
    assert_scores(model.scores([("linear", prompt) for prompt in prompts]), wanted)


# ---- what is refused -------------------------------------------------------------------------------------------------


def broken(source: Path, target: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """A copy with other keys in its configuration, and tensors replaced, added or (None) removed."""
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    if tensors:
        found = load_file(target / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            found.pop(name, None)
            if tensor is not None:
                found[name] = tensor
        save_file(found, target / "adapter_model.safetensors")
    return target


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"use_dora": True}, {}, "'use_dora' (DoRA, whose magnitudes"),
        ({"modules_to_save": ["lm_head"]}, {}, "'modules_to_save' (whole matrices"),
        ({"bias": "all"}, {}, "'bias' is 'all'"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"r": 0}, {}, "'r' is 0, not a rank from 1 to 256"),
        ({"r": 9}, {}, "has rank 8, adapter_config.json says 9"),
        ({"rank_pattern": {"(": 4}}, {}, "'rank_pattern' has the pattern '('"),
        ({"lora_alpha": "x"}, {}, "'lora_alpha' is 'x', not a number"),
        ({}, {f"{Q}.lora_magnitude_vector": torch.ones(96)}, "is not part of a LoRA pair (DoRA)"),
        ({}, {"base_model.model.lm_head.weight": torch.ones(320, 96)}, "is not part of a LoRA pair (modules_to_save"),
        ({}, {f"{Q}.lora_B.weight": None}, "has lora_A only, without its other half"),
        ({}, {f"{Q}.lora_B.weight": torch.ones(95, 8)}, "maps 96 numbers to 95, that of the base model 96 to 96"),
        ({}, {f"{Q}.lora_B.weight": torch.full((96, 8), float("nan"))}, "has numbers that are not finite"),
        ({}, {f"{Q}x.lora_A.weight": torch.ones(8, 96), f"{Q}x.lora_B.weight": torch.ones(96, 8)}, "does not have"),
        (
            {},
            {"base_model.model.lm_head.lora_A.weight": torch.ones(8, 96),
             "base_model.model.lm_head.lora_B.weight": torch.ones(320, 8)},
            "--lora-target-modules that include lm_head",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_exactly_is_refused_by_name(
    base: Path, adapters: dict[str, Path], tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str
) -> None:
    model = AdaptedModel.load(base, {"linear": adapters["linear"]})
    folder = broken(adapters["linear"], tmp_path / "broken", config, **tensors)
    with pytest.raises((ModelFileError, UnsupportedModel)) as caught:
        model.add("broken", folder)
    assert problem in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "broken" not in model.adapters


def test_a_rank_above_the_limit_and_a_folder_without_adapter_are_refused(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    model = AdaptedModel.load(base, {"narrow": adapters["narrow"]}, max_rank=16, at_runtime=True)
    with pytest.raises(UnsupportedModel, match="rank 70; this server takes up to 16"):
        model.add("wide", adapters["wide"])
    with pytest.raises(ModelFileError, match="is not the folder of an adapter"):
        model.add("empty", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors is missing"):
        model.add("empty", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelFileError, match="is truncated"):
        model.add("empty", tmp_path)
    with pytest.raises(LegatoError, match="no 'w_proj'"):
        AdaptedModel.load(base, {}, modules=("w_proj",))
