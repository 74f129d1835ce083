"""Tiny adapters, trained for a moment with plain torch and written by PEFT, which is also the oracle for them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import CausalModel, get_model
from legato.models.targets import AdapterTarget
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import GenerationRequest
from legato.server.adapters import AdapterLimits, ShardAdapters
from tests.server.local import DEVICE, LocalServer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def base_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def train_adapter(base: Path, folder: Path, *, seed: int = 0, num_steps: int = 2, **changes: Any) -> Path:
    """An adapter of `base` that has seen a few random tokens."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(base_model(base), LoraConfig(**{"target_modules": LINEAR, "r": 8, **changes}))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    vocab_size = model.get_base_model().config.vocab_size
    for _ in range(num_steps):
        ids = torch.randint(3, vocab_size, (2, 12))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path | None, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits [length, vocab] of each sequence alone."""
    from peft import PeftModel

    model = base_model(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]


def peft_tokens(base: Path, adapter: Path | None, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What PEFT's model generates greedily."""
    from peft import PeftModel

    model = base_model(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(num_tokens):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            answers.append(ids[len(prompt) :])
    return answers


@dataclass
class AdaptedModel:
    """A shard of a model that takes adapters, without processes."""

    model: CausalModel
    adapters: ShardAdapters
    infos: list[AdapterInfo] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        base: Path,
        folders: dict[str, Path],
        *,
        shard: Shard | None = None,
        quantize: str | None = None,
        max_rank: int | None = None,
        device_ranks: int | None = None,
        modules: tuple[str, ...] = (),
        at_runtime: bool = False,
    ) -> AdaptedModel:
        files = ModelFiles.open(base)
        targets: list[AdapterTarget] = []
        model = get_model(
            files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE, shard=shard, quantize=quantize,
            targets=targets,
        )  # fmt: skip
        limits = AdapterLimits.choose(
            list(folders.values()), targets, max_rank=max_rank, device_ranks=device_ranks, modules=modules,
            at_runtime=at_runtime,
        )  # fmt: skip
        made = cls(model, ShardAdapters(targets, limits, torch.float32, DEVICE))
        for name, folder in folders.items():
            made.add(name, folder)
        return made

    def add(self, name: str, folder: Path) -> AdapterInfo:
        info = self.adapters.load(name, str(folder))
        self.infos.append(AdapterInfo(len(self.infos) + 1, name, info.num_pages, info.path))
        return self.infos[-1]

    def server(self, **how: Any) -> LocalServer:
        server = LocalServer(self.model, adapters=self.adapters, **how)
        for info in self.infos:
            server.scheduler.adapters.add(info)
        return server

    def number(self, name: str | None) -> int:
        return next((info.number for info in self.infos if info.name == name), 0)

    def scores(self, requests: list[tuple[str | None, list[int]]]) -> list[list[float]]:
        """The log probability of every token of each sequence but the first, all in one batch."""
        server = self.server(num_blocks=512, max_rows=64, step_tokens=256)
        todo = [
            GenerationRequest(i + 1, ids, 1, prompt_logprobs=True, ignore_eos=True, adapter=self.number(name))
            for i, (name, ids) in enumerate(requests)
        ]
        server.run(todo)
        found = [server.outputs[request.id][0].prompt_logprobs for request in todo]
        return [[score for score in scores or [] if score is not None] for scores in found]

    def tokens(self, requests: list[tuple[str | None, list[int]]], num_tokens: int, **how: Any) -> list[list[int]]:
        server = self.server(**{"num_blocks": 512, "max_rows": 64, "step_tokens": 96, **how})
        todo = [
            GenerationRequest(i + 1, ids, num_tokens, ignore_eos=True, adapter=self.number(name))
            for i, (name, ids) in enumerate(requests)
        ]
        answers = server.run(todo)
        return [answers[request.id] for request in todo]


def scores_of(logits: list[torch.Tensor], sequences: list[list[int]]) -> list[list[float]]:
    """The log probability of each token, as the logits before it have it."""
    return [
        each[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        for each, ids in zip(logits, sequences, strict=True)
    ]


def random_prompts(count: int, vocab_size: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def write_adapter(base: Path, folder: Path, *, seed: int, rank: int, modules: list[str] | None = None) -> Path:
    """Random matrices in PEFT's files, for tests that need many adapters and no training."""
    tensors = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in (modules or LINEAR):
            outputs, inputs = weight.shape
            found[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
            found[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.05
    folder.mkdir(parents=True)
    save_file(found, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_model(base: Any, adapter: Path) -> Any:
    """A copy of transformers' model, with the adapter's matrices added to its weights."""
    model, tensors = copy.deepcopy(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if "lora_A" in name:
                b = tensors[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * b @ a
    return model


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
