"""Tiny random checkpoints of models with states in some layers and attention in others, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models.tiny_seeds import ORACLE, Tensors, rewrite, write
from tests.tiny_models import write_tokenizer

SIZES: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=68, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
    head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=12,
    max_position_embeddings=256, pad_token_id=0, spread=0.15,
    rms_norm_eps=1e-3,  # what a tiny state returns may be nearly zero, of which a norm would show the rounding
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=7, num_experts_per_tok=3, moe_intermediate_size=44, shared_expert_intermediate_size=52
)


def tiny_qwen3_next(folder: Path, **changes: Any) -> Path:
    return _centred(write(folder, "qwen3_next", {**SIZES, **EXPERTS}, changes))


def tiny_qwen3_5(folder: Path, **changes: Any) -> Path:
    return _centred(write(folder, "qwen3_5_text", SIZES, changes))


def tiny_qwen3_5_moe(folder: Path, **changes: Any) -> Path:
    settings = {**SIZES, **EXPERTS}
    del settings["intermediate_size"]
    return _centred(write(folder, "qwen3_5_moe_text", settings, changes))


def _centred(folder: Path) -> Path:
    """Norms have their weight minus one, but for those within a delta net."""

    def change(tensors: Tensors) -> Tensors:
        norms = [name for name in tensors if name.endswith("norm.weight") and ".linear_attn." not in name]
        return {**tensors, **{name: tensors[name] - 1.0 for name in norms}}

    return rewrite(folder, change)


def beside_vision(make: Callable[..., Path]) -> Callable[..., Path]:
    """As published: the language model in `text_config`, a vision tower and layers for drafts beside it."""

    def published(folder: Path, **changes: Any) -> Path:
        plain = make(folder / ORACLE, **changes)
        write_tokenizer(folder)
        text = json.loads((plain / "config.json").read_text())
        config = dict(model_type=text["model_type"].removesuffix("_text"), text_config=text, vision_config={})
        (folder / "config.json").write_text(json.dumps(config))

        def change(tensors: Tensors) -> Tensors:
            named = {
                name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
                for name, tensor in tensors.items()
            }
            return {**named, "model.visual.merger.norm.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)}

        return rewrite(plain, change, folder)

    return published
