"""Mllama (Llama 3.2 Vision): a Llama with layers between the others that attend to images alone.

What such a layer adds is scaled by gates, and nothing for tokens that no image precedes: there Meta's code is the
definition. transformers lets such tokens attend to all images, padding included, which is not what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato.layers.kv_cache import KVCache, LayerCache
from legato.layers.mutual import cross_attention
from legato.layers.rotary import Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaParts
from legato.models.mllama_tower import MllamaTower
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.rules import Size

CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


class GatedCrossLayer:
    def __init__(self, parts: LlamaParts, name: str) -> None:
        heads, weights, hidden = parts.heads, parts.weights, parts.shape.hidden_size
        self.heads = heads
        self.num_queries = heads.num_heads * heads.head_dim
        self.norm = parts.norm(f"{name}.input_layernorm")
        # Keys and values are of images, queries of text: each product computes all three, of which some are left out.
        self.qkv = weights.qkv([f"{name}.cross_attn.{part}_proj" for part in "qkv"], heads, hidden)
        self.q_norm, self.k_norm = (parts.norm(f"{name}.cross_attn.{part}_norm", heads.head_dim) for part in "qk")
        self.output = weights.output(f"{name}.cross_attn.o_proj", heads, hidden)
        self.mlp_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp = parts.mlp(f"{name}.mlp")
        self.gate, self.mlp_gate = (
            weights.tensor(f"{name}.cross_attn_{part}_gate", (1,)).tanh() for part in ("attn", "mlp")
        )

    def store(self, states: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Keys and values of images."""
        kv = self.qkv(states)[:, self.num_queries :].unflatten(1, (2, self.heads.num_kv_heads, -1))
        cache.store(self.k_norm(kv[:, 0].contiguous()), kv[:, 1], slots)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.norm.add(x, residual)
        images = None if step.images is None else step.images.cross
        if images is None or images.sees is None:
            return step.needed_after_attention(torch.zeros_like(residual)), step.needed_after_attention(residual)
        q = self.q_norm(self.qkv(normed)[:, : self.num_queries].unflatten(1, (self.heads.num_heads, -1)).contiguous())
        attended = self.output(cross_attention(q, cache, step, images, self.heads.head_dim**-0.5)) * self.gate
        normed, residual = self.mlp_norm.add(attended, residual)
        added = self.mlp(normed) * self.mlp_gate * images.sees.to(normed.dtype)
        return step.needed_after_attention(added), step.needed_after_attention(residual)


class Mllama(Llama):
    position_shifts: torch.Tensor | None = None
    can_capture = False  # which slots a token attends to is known on the host
    sees_runs = True
    num_inputs_only = 8

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.cross_layers = _cross_layers(keys, config.num_layers)
        root = weights.prefix("model.", "multi_modal_projector.weight")
        places = ("model.language_model", "language_model.model")
        self.prefix = next((place for place in places if f"{place}.embed_tokens.weight" in weights), places[0])
        self.head_name = "lm_head" if "lm_head.weight" in weights else "language_model.lm_head"
        super().__init__(config, weights)
        self.tower = MllamaTower(keys.below("vision_config"), weights, f"{root}vision_model")
        self.projector = weights.linear(
            f"{root}multi_modal_projector", config.hidden_size, self.tower.shape.num_features, bias=True
        )

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        if int(name.rpartition(".")[2]) in self.cross_layers:
            return GatedCrossLayer(parts, name)
        return super().layer(parts, name, rotary, window)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """[tiles (patches + 1), hidden_size]"""
        return self.projector(self.tower(pixels, shape))

    def store_images(self, states: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            if isinstance(layer, GatedCrossLayer):
                layer.store(states, layer_cache, slots)

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """Images are not in the text."""


def _cross_layers(keys: Keys, num_layers: int) -> frozenset[int]:
    named = keys.get("cross_attention_layers")
    return frozenset(layer for layer in (CROSS_LAYERS if named is None else named) if 0 <= int(layer) < num_layers)
