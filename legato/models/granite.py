"""Granite 3 and 4, the dense ones: Llama with a factor on the embedding, on every addition, on scores and on logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from legato.layers.kv_cache import LayerCache
from legato.layers.rotary import Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.llama import Llama, LlamaParts, LlamaShape


class GraniteLayer:
    def __init__(self, parts: LlamaParts, name: str, rotary: Rotary, factor: float) -> None:
        self.norm = parts.norm(f"{name}.input_layernorm")
        self.attention = parts.attention(f"{name}.self_attn", rotary)
        self.mlp_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp = parts.mlp(f"{name}.mlp")
        self.factor = factor

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm.add(x, residual)
        attended = self.attention(normed, cache, step).mul_(self.factor)
        normed, residual = self.mlp_norm.add(attended, step.needed_after_attention(residual))
        return self.mlp(normed).mul_(self.factor), residual


class Granite(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        self.embedding_factor = keys.number("embedding_multiplier", default=1.0)
        self.layer_factor = keys.number("residual_multiplier", default=1.0)
        self.logits_divisor = keys.number("logits_scaling", default=1.0)
        return replace(LlamaShape.of(config), scale=keys.number("attention_multiplier", default=1.0))

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return GraniteLayer(parts, name, rotary, self.layer_factor)

    def embed(self, step: Step) -> torch.Tensor:
        return super().embed(step).mul_(self.embedding_factor)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).div_(self.logits_divisor)
