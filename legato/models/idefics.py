"""Idefics (the first): a Llama with layers between the others that attend to images, as Flamingo has them.

CLIP's tower reads an image, and a few learned latents attend to what it saw. Every text token attends to the latents of
the last image before it. The tokens around images are behind the vocabulary and have matrices of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from legato.layers.kv_cache import KVCache, LayerCache
from legato.layers.mlp import MLP
from legato.layers.mutual import cross_attention
from legato.layers.norm import LayerNorm
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer, Norm
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaParts
from legato.models.llava_next import CLIP, ClipTower
from legato.models.siglip import PatchTowerShape
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.rules import Size

NORM_EPS = 1e-5  # of the resampler


class IdeficsCrossLayer:
    def __init__(self, parts: LlamaParts, name: str, image_width: int, keys: Keys) -> None:
        heads, weights, hidden = parts.heads, parts.weights, parts.shape.hidden_size
        attention = f"{name}.cross_attn"
        self.heads = heads
        self.norm = parts.norm(f"{name}.input_layernorm")
        self.q = weights.per_head(f"{attention}.q_proj", heads, heads.head_dim, hidden)
        self.kv = weights.per_head([f"{attention}.{part}_proj" for part in "kv"], heads, heads.head_dim, image_width)
        self.head_norms: list[Norm] = []
        if keys.flag("qk_layer_norms"):
            self.head_norms = [parts.norm(f"{attention}.{part}_layer_norm", heads.head_dim) for part in "qk"]
        self.output = weights.output(f"{attention}.o_proj", heads, hidden)
        self.mlp_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp = parts.mlp(f"{name}.mlp")
        size = (1, 1, hidden) if keys.text("alpha_type", default="float") == "vector" else (1,)
        self.gate, self.mlp_gate = (
            weights.tensor(f"{name}.alpha_{part}", size).tanh().flatten() for part in ("cross_attn", "dense")
        )

    def store(self, states: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Keys and values of images."""
        keys, values = self.kv(states).unflatten(1, (2, self.heads.num_heads, -1)).unbind(1)
        cache.store(self.head_norms[1](keys.contiguous()) if self.head_norms else keys, values, slots)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The MLP is also for tokens that see no image."""
        normed, residual = self.norm.add(x, residual)
        images = None if step.images is None else step.images.cross
        if images is None or images.sees is None:
            normed = self.mlp_norm(residual)
        else:
            q = self.q(normed).unflatten(1, (self.heads.num_heads, -1))
            q = self.head_norms[0](q) if self.head_norms else q
            attended = self.output(cross_attention(q, cache, step, images, self.heads.head_dim**-0.5)) * self.gate
            normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp(normed) * self.mlp_gate, residual


class LatentsLayer:
    """Latents attend to an image and to each other."""

    def __init__(self, weights: Weights, name: str, width: int, keys: Keys) -> None:
        self.num_heads = keys.count("resampler_n_heads", default=16)
        inner = self.num_heads * keys.count("resampler_head_dim", default=96)
        attention, mlp = f"{name}.0", f"{name}.1"
        self.norm, self.image_norm = (
            weights.layer_norm(f"{attention}.{part}_layer_norm", width, NORM_EPS) for part in ("latents", "context")
        )
        self.q = weights.linear(f"{attention}.q_proj", inner, width)
        self.kv = weights.linear([f"{attention}.{part}_proj" for part in "kv"], inner, width)
        self.output = weights.linear(f"{attention}.output_proj", width, inner)
        self.head_norms: list[LayerNorm] = []
        if keys.flag("qk_layer_norms_perceiver"):
            size = inner // self.num_heads
            self.head_norms = [weights.layer_norm(f"{attention}.{part}_layer_norm", size, NORM_EPS) for part in "qk"]
        self.mlp_norm = weights.layer_norm(f"{mlp}.ln", width, NORM_EPS)
        self.mlp = MLP(
            weights.linear(f"{mlp}.fc", 4 * width, width), weights.linear(f"{mlp}.c_proj", width, 4 * width), "relu"
        )

    def __call__(self, latents: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        normed = self.norm(latents)
        q = self.q(normed).unflatten(1, (self.num_heads, -1))
        kv = self.kv(torch.cat((self.image_norm(image), normed))).unflatten(1, (2, self.num_heads, -1))
        k, v = kv.unbind(1)
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k.contiguous())
        mixed = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (q, k, v)))[0]
        latents = latents + self.output(mixed.transpose(0, 1).flatten(1))
        return latents + self.mlp(self.mlp_norm(latents))


class Idefics(Llama):
    position_shifts: torch.Tensor | None = None
    can_capture = False  # which slots a token attends to is known on the host
    sees_runs = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        vision, perceiver = keys.below("vision_config"), keys.below("perceiver_config")
        width = vision.count("embed_dim", "hidden_size", default=768)
        sizes = dict(CLIP, hidden_act="gelu", image_size=224, intermediate_size=5120, num_hidden_layers=32)
        shape = PatchTowerShape.of(vision.over(**{**sizes, "hidden_size": width}))
        super().__init__(config, weights)
        self.num_first = config.vocab_size  # tokens with rows in the usual matrices
        count = keys.count("additional_vocab_size", default=1) if keys.get("additional_vocab_size") else 0
        self.config = replace(self.config, vocab_size=config.vocab_size + count)
        self.more_tokens: torch.Tensor | None = None
        self.more_logits: torch.Tensor | None = None
        if count:
            self.more_tokens = weights.tensor("model.embed_tokens.additional_embedding.weight", (count, hidden))
            name = "lm_head.additional_fc.weight"
            tied = keys.flag("tie_word_embeddings") or name not in weights
            self.more_logits = self.more_tokens if tied else weights.tensor(name, (count, hidden))
            weights.skip(name)
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        parts, every = self.parts(self.read(config), heads, weights), keys.count("cross_layer_interval", default=1)
        layers: list[Layer] = []
        for i, layer in enumerate(self.layers):
            if i % every == 0 and i // every < config.num_layers // every:
                name = f"model.gated_cross_attn_layers.{i // every}"
                layers.append(IdeficsCrossLayer(parts, name, width, keys))
            layers.append(layer)
        self.layers = layers
        # Scales are those of the text layers, whose numbers are others here.
        self.kv_shape = replace(self.kv_shape, num_layers=len(self.layers), scales=())
        self.tower = ClipTower(shape, shape.num_layers, weights, "model.vision_model", keeps_first=True)
        self.latents: torch.Tensor | None = None
        if keys.flag("use_resampler"):
            name, count = "model.perceiver_resampler", perceiver.count("resampler_n_latents", default=64)
            self.latents = weights.tensor(f"{name}.latents", (count, width))
            depth = perceiver.count("resampler_depth", default=6)
            self.resampler = [LatentsLayer(weights, f"{name}.blocks.{i}", width, perceiver) for i in range(depth)]
            self.latents_norm = weights.layer_norm(f"{name}.layer_norm", width, NORM_EPS)

    def embed(self, step: Step) -> torch.Tensor:
        ids = step.input_ids
        x = self.embedding(ids.clamp(max=self.num_first - 1))
        if self.more_tokens is None:
            return x
        more = F.embedding((ids - self.num_first).clamp(min=0), self.more_tokens)
        return torch.where((ids >= self.num_first)[:, None], more, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        logits = self.head(normed)
        return logits if self.more_logits is None else torch.cat((logits, normed @ self.more_logits.t()), dim=1)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """[latents, width of the tower]"""
        seen = self.tower(pixels)[0]
        if self.latents is None:
            return seen
        latents = self.latents
        for layer in self.resampler:
            latents = layer(latents, seen)
        return self.latents_norm(latents)

    def store_images(self, states: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            if isinstance(layer, IdeficsCrossLayer):
                layer.store(states, layer_cache, slots)

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """Images are not in the text."""
