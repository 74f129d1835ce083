"""Qwen3-VL: Qwen 3 with a vision tower, some of whose layers the first layers of the language model see as well.

What those layers of the tower make of an image is added to the stream behind the first layers, at the image's tokens
(DeepStack). It travels beside the image's embeddings, as more columns of them. The three axes of positions take turns
over the dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.kv_cache import LayerCache
from legato.layers.mlp import MLP, Product
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.keys import Keys
from legato.models.llama import LlamaShape
from legato.models.qwen2_vl import NORM_EPS, Qwen2VL, Tower, TowerShape
from legato.models.weights import Weights
from legato.vision.rules import Size

DEEP_LAYERS = (8, 16, 24)


@dataclass(frozen=True, slots=True)
class DeepTowerShape(TowerShape):
    num_places: int = 2304  # of the table of positions, a square
    deep_layers: tuple[int, ...] = DEEP_LAYERS

    @classmethod
    def of(cls, keys: Keys) -> DeepTowerShape:
        deep = keys.get("deepstack_visual_indexes")
        deep = list(DEEP_LAYERS) if deep is None else deep
        if not isinstance(deep, list) or not all(isinstance(layer, int) for layer in deep):
            raise ModelFileError(f"{keys.path}: 'deepstack_visual_indexes' is {deep!r}, not a list of layers")
        return cls(
            depth=keys.count("depth", default=27),
            width=keys.count("hidden_size", default=1152),
            num_heads=keys.count("num_heads", default=16),
            inner=keys.count("intermediate_size", default=4304),
            activation=keys.text("hidden_act", default="gelu_pytorch_tanh"),
            patch=keys.count("patch_size", default=16),
            frames=keys.count("temporal_patch_size", default=2),
            channels=keys.count("in_channels", default=3),
            merge=keys.count("spatial_merge_size", default=2),
            theta=keys.below("rope_parameters").number("rope_theta", default=10_000.0),
            num_places=keys.count("num_position_embeddings", default=2304),
            deep_layers=tuple(deep),
        )


class DeepTower(Tower):
    shape: DeepTowerShape

    def __init__(self, shape: DeepTowerShape, hidden_size: int, weights: Weights, name: str) -> None:
        super().__init__(shape, hidden_size, weights, name)
        side = round(shape.num_places**0.5)
        self.patch_bias = weights.tensor(f"{name}.patch_embed.proj.bias", (shape.width,))
        places = weights.tensor(f"{name}.pos_embed.weight", (shape.num_places, shape.width))
        self.places = places.float().t().reshape(1, shape.width, side, side)
        cell = shape.width * shape.merge**2
        self.deep = []
        for i in range(len(shape.deep_layers)):
            merger = f"{name}.deepstack_merger_list.{i}"
            norm = weights.layer_norm(f"{merger}.norm", cell, NORM_EPS)
            self.deep.append((norm, self._merger_mlp(weights, merger, hidden_size)))

    def make_merger(self, weights: Weights, name: str, hidden_size: int) -> tuple[Product, Product]:
        return self._norm(weights, f"{name}.norm"), self._merger_mlp(weights, name, hidden_size)

    def _merger_mlp(self, weights: Weights, name: str, hidden_size: int) -> MLP:
        cell = self.shape.width * self.shape.merge**2
        return MLP(
            weights.linear(f"{name}.linear_fc1", cell, cell, bias=True),
            weights.linear(f"{name}.linear_fc2", hidden_size, cell, bias=True),
            "gelu",
        )

    def _mlp(self, weights: Weights, name: str) -> Product:
        shape, width = self.shape, self.shape.width
        return MLP(
            weights.linear(f"{name}.linear_fc1", shape.inner, width, bias=True),
            weights.linear(f"{name}.linear_fc2", width, shape.inner, bias=True),
            shape.activation,
        )

    def __call__(self, patches: torch.Tensor, grid: Size) -> torch.Tensor:
        """[cells, hidden_size (1 + number of deep layers)]"""
        x = patches.to(self.patches.dtype) @ self.patches.t() + self.patch_bias
        x = x + self._positions(grid).to(x.dtype)
        angles, cell = self.angles(grid), self.shape.width * self.shape.merge**2
        deep: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer(x, [(1, len(x))], angles)
            if i in self.shape.deep_layers:
                norm, mlp = self.deep[self.shape.deep_layers.index(i)]
                deep[i] = mlp(norm(x.view(-1, cell)))
        merged = self.merger(self.merger_norm(x).view(-1, cell))
        return torch.cat((merged, *(deep[i] for i in self.shape.deep_layers)), dim=1)

    def _positions(self, grid: Size) -> torch.Tensor:
        """The table stretched over the image, in the order of the patches."""
        stretched = F.interpolate(self.places, (grid.height, grid.width), mode="bilinear", align_corners=True)
        return self.by_cells(stretched[0].permute(1, 2, 0))


class DeepLayer:
    """Behind it an image's tokens get what a layer of the tower has made of them."""

    def __init__(self, layer: Layer, first_column: int, width: int) -> None:
        self.layer = layer
        self.columns = slice(first_column, first_column + width)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.layer(x, residual, cache, step)
        images = step.images
        if images is not None and images.places is not None and images.embeddings is not None:
            assert residual is not None
            seen = images.embeddings[:, self.columns].to(residual.dtype)
            residual = residual.index_add(0, images.places, seen)
        return x, residual


class Qwen3VL(Qwen2VL):
    default_sections = (24, 20, 20)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert isinstance(self.tower, DeepTower)
        width, num_deep = config.hidden_size, len(self.tower.shape.deep_layers)
        if num_deep >= config.num_layers:
            raise UnsupportedModel(f"config.json: {num_deep} deepstack layers are too many for {config.num_layers}")
        self.layers = [
            DeepLayer(layer, (i + 1) * width, width) if i < num_deep else layer for i, layer in enumerate(self.layers)
        ]

    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), has_head_norms=True)

    def make_axes(self, sections: Sequence[int]) -> list[int]:
        axes = [0] * sum(sections)
        for axis in (1, 2):
            places = range(axis, 3 * sections[axis], 3)
            for place in places:
                axes[place] = axis
        return axes

    def make_tower(self, keys: Keys, hidden_size: int, weights: Weights, name: str) -> Tower:
        return DeepTower(DeepTowerShape.of(keys), hidden_size, weights, name)

    def embed(self, step: Step) -> torch.Tensor:
        images = step.images
        if images is None or images.embeddings is None:
            return super().embed(step)
        first = replace(images, embeddings=images.embeddings[:, : self.config.hidden_size])
        return super().embed(replace(step, images=first))
