"""A tiny model twice: quantized in some layout, and dense with the numbers that the quantized tensors stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.quantization.packers import Layout
from tests.tiny_models import tiny_llama

SIZES = dict(
    hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_hidden_layers=2, initializer_range=0.15,
)  # fmt: skip


def base_model(folder: Path) -> Path:
    return tiny_llama(folder, **SIZES)


# Embeddings, heads and routers, which nobody quantizes.
NOT_QUANTIZED = ("embed", "wte", "wpe", "lm_head", ".gate.weight", "shared_expert_gate", "shared.weight", "bias.weight")


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in NOT_QUANTIZED)


def write_twins(base: Path, folder: Path, layout: Layout, transposed: bool = False) -> tuple[Path, Path]:
    """(quantized, dense). `transposed` is for models whose dense matrices are [in, out]; quantized ones never are."""
    quantized, dense = folder / "quantized", folder / "dense"
    tensors = load_file(base / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_matrix(name, tensor):
            packed[name] = numbers[name] = tensor
            continue
        module = name.removesuffix(".weight")
        matrix = tensor.t() if transposed else tensor
        found, values = layout.pack(module, matrix.double().numpy())
        packed |= {f"{module}.{suffix}": part for suffix, part in found.items()}
        dequantized = torch.from_numpy(values).float()
        numbers[name] = dequantized.t() if transposed else dequantized
    for target, content in ((quantized, packed), (dense, numbers)):
        shutil.copytree(base, target)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, target / "model.safetensors")
    write_config(quantized, layout, packed)
    return quantized, dense


def write_config(folder: Path, layout: Layout, tensors: dict[str, torch.Tensor]) -> None:
    if layout.file == "tensors":
        added = {f"gptq_{name}": torch.tensor(layout.config[key]) for name, key in TENSOR_NAMES.items()}
        save_file({**{name: t.contiguous() for name, t in tensors.items()}, **added}, folder / "model.safetensors")
    elif layout.file == "config.json":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    else:
        (folder / layout.file).write_text(json.dumps(layout.config))


TENSOR_NAMES = {"bits": "bits", "groupsize": "group_size"}
