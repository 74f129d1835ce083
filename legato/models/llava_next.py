"""LLaVA-NeXT: CLIP's tower, a projector, and a Llama or a Mistral.

An image is encoded twice: as a whole, shrunk to a tile, and in tiles that together have about its own resolution. Every
row of patches of the latter ends with a token of its own, and rows and columns that are mere padding are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato.common.errors import UnsupportedModel
from legato.layers.mlp import MLP
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaShape, Mistral
from legato.models.siglip import PatchTowerShape, tower_layer
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.rules import LlavaNextRules, Size

# CLIP's tower, where config.json leaves its sizes out.
CLIP = dict(
    hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, intermediate_size=4096, patch_size=14,
    image_size=336, layer_norm_eps=1e-5, hidden_act="quick_gelu",
)  # fmt: skip


class ClipTower:
    """Up to the layer whose states the projector reads; layers behind that one are not loaded."""

    def __init__(
        self, shape: PatchTowerShape, depth: int, weights: Weights, name: str, *, keeps_first: bool = False
    ) -> None:
        self.first_kept = 0 if keeps_first else 1
        kernel = (shape.width, 3, shape.patch, shape.patch)
        self.patch = shape.patch
        self.patches = weights.tensor(f"{name}.embeddings.patch_embedding.weight", kernel).flatten(1)
        self.first = weights.tensor(f"{name}.embeddings.class_embedding", (shape.width,))
        num_places = (shape.tile // shape.patch) ** 2 + 1
        self.places = weights.tensor(f"{name}.embeddings.position_embedding.weight", (num_places, shape.width))
        self.norm = weights.layer_norm(f"{name}.pre_layrnorm", shape.width, shape.eps)
        self.layers = [tower_layer(shape, weights, f"{name}.encoder.layers.{i}") for i in range(depth)]
        for unread in (*(f"encoder.layers.{i}" for i in range(depth, shape.num_layers)), "post_layernorm"):
            weights.skip_below(f"{name}.{unread}")
        weights.skip(f"{name}.embeddings.position_ids")

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """tiles [n, 3, tile, tile] -> [n, patches, width], with or without the token that stands for the whole tile."""
        side = tiles.shape[-1] // self.patch
        cut = tiles.unflatten(3, (side, self.patch)).unflatten(2, (side, self.patch))  # [n, 3, row, y, column, x]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.patches.dtype) @ self.patches.t()
        x = torch.cat((self.first.expand(len(tiles), 1, -1), patches), dim=1) + self.places
        x = self.norm(x.flatten(0, 1))
        groups = [(len(tiles), len(x) // len(tiles))]
        for layer in self.layers:
            x = layer(x, groups)
        return x.unflatten(0, (len(tiles), -1))[:, self.first_kept :]


class LlavaNext(Llama):
    prefix = "language_model.model"
    head_name = "language_model.lm_head"
    position_shifts: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        shape = PatchTowerShape.of(keys.below("vision_config").over(**CLIP))
        depth = _depth(keys, shape.num_layers)
        bias = keys.flag("multimodal_projector_bias", default=True)
        self.rules = LlavaNextRules.of(keys.raw, {})
        super().__init__(config, weights)
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
