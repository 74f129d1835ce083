"""SigLIP's tower: learned positions on a grid of patches, and no token for the whole image.

Gemma's images are squares of one size. Those of Idefics may be smaller: patches then have the nearest positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.layers.mlp import MLP
from legato.models.keys import Keys
from legato.models.vision import TowerAttention, TowerLayer
from legato.models.weights import Weights


@dataclass(frozen=True, slots=True)
class PatchTowerShape:
    """Of SigLIP's tower and of CLIP's; the defaults are SigLIP's."""

    width: int
    num_heads: int
    num_layers: int
    inner: int
    patch: int
    tile: int
    eps: float
    activation: str

    @classmethod
    def of(cls, keys: Keys) -> PatchTowerShape:
        return cls(
            width=keys.count("hidden_size", default=1152),
            num_heads=keys.count("num_attention_heads", default=16),
            num_layers=keys.count("num_hidden_layers", default=12),
            inner=keys.count("intermediate_size", default=3072),
            patch=keys.count("patch_size", default=32),
            tile=keys.count("image_size", default=224),
            eps=keys.number("layer_norm_eps", default=1e-6),
            activation=keys.text("hidden_act", default="gelu_pytorch_tanh"),
        )

    @property
    def side(self) -> int:
        """Patches on each side of a tile."""
        return self.tile // self.patch


class SiglipTower:
    is_fractional = True  # also where an image has all patches, whose places are then found by rounding

    def __init__(self, shape: PatchTowerShape, weights: Weights, name: str) -> None:
        self.shape = shape
        kernel = (shape.width, 3, shape.patch, shape.patch)
        self.patches = weights.tensor(f"{name}.embeddings.patch_embedding.weight", kernel).flatten(1)
        self.bias = weights.tensor(f"{name}.embeddings.patch_embedding.bias", (shape.width,))
        table = (shape.side**2, shape.width)
        self.places = weights.tensor(f"{name}.embeddings.position_embedding.weight", table)
        self.layers = [tower_layer(shape, weights, f"{name}.encoder.layers.{i}") for i in range(shape.num_layers)]
        self.norm = weights.layer_norm(f"{name}.post_layernorm", shape.width, shape.eps)
        weights.skip(f"{name}.embeddings.position_ids")
        weights.skip_below(f"{name}.head")

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """tiles [n, 3, height, width] -> [n, patches, width of the tower]"""
        patch, (rows, columns) = self.shape.patch, (size // self.shape.patch for size in tiles.shape[2:])
        cut = tiles.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))  # [n, 3, row, y, column, x]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.patches.dtype)
        x = patches @ self.patches.t() + self.bias + self.places[self._places(rows, columns)]
        x, groups = x.flatten(0, 1), [(len(tiles), rows * columns)]
        for layer in self.layers:
            x = layer(x, groups)
        return self.norm(x).unflatten(0, groups[0])

    def _places(self, rows: int, columns: int) -> torch.Tensor:
        """Of each patch, its place in the table: as far across and down as it is in the image.

        In float32 and by these operations: what is exactly between two places falls where it fell in training.
        """
        side = self.shape.side
        if rows == columns == side and not self.is_fractional:
            return torch.arange(side**2, device=self.places.device)
        edges = torch.arange(1 / side, 1.0, 1 / side)
        down, across = (
            torch.bucketize((torch.arange(count).float() * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6), edges,
                            right=True)
            for count in (rows, columns)
        )  # fmt: skip
        return (down[:, None] * side + across).flatten().to(self.places.device)


def tower_layer(shape: PatchTowerShape, weights: Weights, name: str) -> TowerLayer:
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
