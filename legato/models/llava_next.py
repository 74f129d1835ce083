"""LLaVA-NeXT: CLIP's tower, a projector, and a Llama or a Mistral.

An image is encoded twice: as a whole, shrunk to a tile, and in tiles that together have about its own resolution. Every
row of patches of the latter ends with a token of its own, and rows and columns that are mere padding are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from legato.common.errors import UnsupportedModel
from legato.layers.mlp import MLP
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaShape, Mistral
from legato.models.vision import ImageSpan, TowerAttention, TowerLayer
from legato.models.weights import Weights
from legato.vision.rules import LlavaNextRules, Size


@dataclass(frozen=True, slots=True)
class ClipShape:
    width: int
    num_heads: int
    num_layers: int
    inner: int
    patch: int
    tile: int
    eps: float
    activation: str

    @classmethod
    def of(cls, keys: Keys) -> ClipShape:
        return cls(
            width=keys.count("hidden_size", default=1024),
            num_heads=keys.count("num_attention_heads", default=16),
            num_layers=keys.count("num_hidden_layers", default=24),
            inner=keys.count("intermediate_size", default=4096),
            patch=keys.count("patch_size", default=14),
            tile=keys.count("image_size", default=336),
            eps=keys.number("layer_norm_eps", default=1e-5),
            activation=keys.text("hidden_act", default="quick_gelu"),
        )


class ClipTower:
    """Up to the layer whose states the projector reads; layers behind that one are not loaded."""

    def __init__(self, shape: ClipShape, depth: int, weights: Weights, name: str) -> None:
        kernel = (shape.width, 3, shape.patch, shape.patch)
        self.patch = shape.patch
        self.patches = weights.tensor(f"{name}.embeddings.patch_embedding.weight", kernel).flatten(1)
        self.first = weights.tensor(f"{name}.embeddings.class_embedding", (shape.width,))
        num_places = (shape.tile // shape.patch) ** 2 + 1
        self.places = weights.tensor(f"{name}.embeddings.position_embedding.weight", (num_places, shape.width))
        self.norm = weights.layer_norm(f"{name}.pre_layrnorm", shape.width, shape.eps)
        self.layers = [_layer(shape, weights, f"{name}.encoder.layers.{i}") for i in range(depth)]
        for unread in (*(f"encoder.layers.{i}" for i in range(depth, shape.num_layers)), "post_layernorm"):
            weights.skip_below(f"{name}.{unread}")
        weights.skip(f"{name}.embeddings.position_ids")

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """tiles [n, 3, tile, tile] -> [n, patches, width], without the token that stands for the whole tile."""
        side = tiles.shape[-1] // self.patch
        cut = tiles.unflatten(3, (side, self.patch)).unflatten(2, (side, self.patch))  # [n, 3, row, y, column, x]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.patches.dtype) @ self.patches.t()
        x = torch.cat((self.first.expand(len(tiles), 1, -1), patches), dim=1) + self.places
        x = self.norm(x.flatten(0, 1))
        groups = [(len(tiles), len(x) // len(tiles))]
        for layer in self.layers:
            x = layer(x, groups)
        return x.unflatten(0, (len(tiles), -1))[:, 1:]


def _layer(shape: ClipShape, weights: Weights, name: str) -> TowerLayer:
    width = shape.width
    return TowerLayer(
        weights.layer_norm(f"{name}.layer_norm1", width, shape.eps),
        TowerAttention(
            weights.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], width, width, bias=True),
            weights.linear(f"{name}.self_attn.out_proj", width, width, bias=True),
            shape.num_heads,
        ),
        weights.layer_norm(f"{name}.layer_norm2", width, shape.eps),
        MLP(
            weights.linear(f"{name}.mlp.fc1", shape.inner, width, bias=True),
            weights.linear(f"{name}.mlp.fc2", width, shape.inner, bias=True),
            shape.activation,
        ),
    )


class LlavaNext(Llama):
    prefix = "language_model.model"
    position_shifts: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        shape = ClipShape.of(keys.below("vision_config"))
        depth = _depth(keys, shape.num_layers)
        bias = keys.flag("multimodal_projector_bias", default=True)
        self.rules = LlavaNextRules.of(keys.raw, {})
        super().__init__(config, weights)
        size = (config.vocab_size, hidden)
        self.head = weights.head("language_model.lm_head", self.embedding, *size, tied=config.is_tied)
        prefix = "vision_tower.vision_model"
        self.tower = ClipTower(
            shape, depth, weights, prefix if f"{prefix}.pre_layrnorm.bias" in weights else "vision_tower"
        )
        self.projector = MLP(
            weights.linear("multi_modal_projector.linear_1", hidden, shape.width, bias=bias),
            weights.linear("multi_modal_projector.linear_2", hidden, hidden, bias=bias),
            keys.text("projector_hidden_act", default="gelu"),
        )
        self.newline = weights.tensor("image_newline", (hidden,))

    def read(self, config: ModelConfig) -> LlamaShape:
        """The language model says itself what it is."""
        kinds = {"llama": Llama, "mistral": Mistral}
        kind = config.keys.text("model_type", default="llama")
        if kind not in kinds:
            raise UnsupportedModel(f"LLaVA-NeXT with a language model '{kind}' is not supported; known: llama, mistral")
        return LlamaShape.of(config) if kind == "llama" else Mistral.read(self, config)  # type: ignore[arg-type]

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """The whole image, then row by row its tiles without padding; `shape` is its size as it was sent."""
        seen = self.tower(pixels)
        whole, *tiles = self.projector(seen.flatten(0, 1)).unflatten(0, seen.shape[:2]).unbind(0)
        side, best = self.rules.tile // self.rules.patch, self.rules.best(shape)
        grid = (best.height // self.rules.tile, best.width // self.rules.tile, side, side)
        rows = (
            torch.stack(tiles).unflatten(0, grid[:2]).unflatten(2, grid[2:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )
        top, left = self.rules.padding(shape)
        rows = rows[top : len(rows) - top, left : rows.shape[1] - left]
        ends = self.newline.expand(len(rows), 1, -1)
        return torch.cat((whole, torch.cat((rows, ends), dim=1).flatten(0, 1)))

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """As text is."""


def _depth(keys: Keys, num_layers: int) -> int:
    """Layers to compute: config.json counts states, of which there is one before the first layer."""
    layer, strategy = keys.get("vision_feature_layer"), keys.text("vision_feature_select_strategy", default="default")
    layer = -2 if layer is None else layer
    if strategy != "default" or not isinstance(layer, int) or not -num_layers <= layer < 0:
        raise UnsupportedModel(
            "config.json: only one vision_feature_layer, counted from the end, can be read, by default"
        )
    return num_layers + 1 + layer
