"""Idefics2: SigLIP's tower on images of any shape, a resampler, and a Mistral.

An image is encoded as a whole, and before that its four quarters, if the processor splits images. Whatever its size,
each of them becomes the same number of tokens: a few learned latents attend to its patches, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import UnsupportedModel
from legato.layers.mlp import GatedMLP
from legato.layers.norm import RMSNorm
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaShape, Mistral
from legato.models.siglip import PatchTowerShape, SiglipTower
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.idefics import Idefics2Rules
from legato.vision.rules import ImageRules, Size


@dataclass(frozen=True, slots=True)
class ResamplerShape:
    width: int
    num_latents: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str

    @classmethod
    def of(cls, keys: Keys, width: int) -> ResamplerShape:
        return cls(
            width=width,
            num_latents=keys.count("resampler_n_latents", default=64),
            depth=keys.count("resampler_depth", default=3),
            num_heads=keys.count("resampler_n_heads", default=16),
            num_kv_heads=keys.count("num_key_value_heads", default=4),
            head_dim=keys.count("resampler_head_dim", default=96),
            eps=keys.number("rms_norm_eps", default=1e-6),
            activation=keys.text("hidden_act", default="silu"),
        )

    def norm(self, weights: Weights, name: str) -> RMSNorm:
        return RMSNorm(weights.tensor(f"{name}.weight", (self.width,)), self.eps)


class ResamplerLayer:
    """Latents attend to the image and to each other."""

    def __init__(self, shape: ResamplerShape, weights: Weights, name: str) -> None:
        self.shape = shape
        width, queries, keys = shape.width, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.latents_norm = shape.norm(weights, f"{name}.input_latents_norm")
        self.context_norm = shape.norm(weights, f"{name}.input_context_norm")
        self.q = weights.linear(f"{name}.self_attn.q_proj", queries, width)
        self.kv = weights.linear([f"{name}.self_attn.{part}_proj" for part in "kv"], keys, width)
        self.output = weights.linear(f"{name}.self_attn.o_proj", width, queries)
        self.mlp_norm = shape.norm(weights, f"{name}.post_attention_layernorm")
        self.mlp = gated_mlp(weights, f"{name}.mlp", (width, 4 * width, width), shape.activation)

    def __call__(self, latents: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """[num_latents, width] and [patches, width]"""
        head_dim, share = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        normed = self.latents_norm(latents)
        q = self.q(normed).unflatten(1, (-1, head_dim)).transpose(0, 1)
        k, v = self.kv(torch.cat((self.context_norm(context), normed))).chunk(2, dim=1)
        k, v = (part.unflatten(1, (-1, head_dim)).transpose(0, 1).repeat_interleave(share, dim=0) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
        latents = latents + self.output(mixed)
        return latents + self.mlp(self.mlp_norm(latents))


class Resampler:
    def __init__(self, shape: ResamplerShape, weights: Weights, name: str) -> None:
        self.latents = weights.tensor(f"{name}.latents", (shape.num_latents, shape.width))
        self.layers = [ResamplerLayer(shape, weights, f"{name}.layers.{i}") for i in range(shape.depth)]
        self.norm = shape.norm(weights, f"{name}.norm")

    def __call__(self, context: torch.Tensor) -> torch.Tensor:
        latents = self.latents
        for layer in self.layers:
            latents = layer(latents, context)
        return self.norm(latents)


class Idefics2(Llama):
    prefix = "model.text_model"
    position_shifts: torch.Tensor | None = None
    image_rules: ImageRules | None = None  # written by the server

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        vision = keys.below("vision_config")
        shape = PatchTowerShape.of(vision.over(hidden_size=768, num_attention_heads=12))
        super().__init__(config, weights)
        connector, inner = "model.connector", keys.count("intermediate_size")
        self.tower = SiglipTower(shape, weights, "model.vision_model")
        self.projector = gated_mlp(
            weights,
            f"{connector}.modality_projection",
            (shape.width, inner, hidden),
            keys.text("hidden_act", default="silu"),
        )
        resampler = ResamplerShape.of(keys.below("perceiver_config"), hidden)
        self.resampler = Resampler(resampler, weights, f"{connector}.perceiver_resampler")

    def read(self, config: ModelConfig) -> LlamaShape:
        kind = config.keys.below("text_config").text("model_type", default="mistral")
        if kind not in ("llama", "mistral"):
            raise UnsupportedModel(f"Idefics2 with a language model '{kind}' is not supported; known: llama, mistral")
        return LlamaShape.of(config) if kind == "llama" else Mistral.read(self, config)  # type: ignore[arg-type]

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """`shape` is the image's size as it was sent; `pixels` [n, 3, height, width] have its parts, each in the upper
        left corner."""
        rules = self.image_rules
        assert isinstance(rules, Idefics2Rules), "the server says how images are split"
        patch, seen = self.tower.shape.patch, []
        for part, size in zip(pixels, rules.parts(shape), strict=True):
            tall, wide = (
                min(-(-length // patch), room // patch)
                for length, room in zip((size.height, size.width), part.shape[1:], strict=True)
            )
            seen.append(self.resampler(self.projector(self.tower(part[None, :, : tall * patch, : wide * patch])[0])))
        ids = torch.tensor(rules.image_ids(shape), device=pixels.device)
        x = self.embedding(ids)
        return x.index_copy_(0, (ids == rules.token_id).nonzero()[:, 0], torch.cat(seen).to(x.dtype))

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """As text is."""


def gated_mlp(weights: Weights, name: str, sizes: tuple[int, int, int], activation: str) -> GatedMLP:
    """Whole on every shard: from the first size through the second to the third."""
    width, inner, out = sizes
    return GatedMLP(
        weights.linear([f"{name}.gate_proj", f"{name}.up_proj"], inner, width),
        weights.linear(f"{name}.down_proj", out, inner),
        activation,
    )
