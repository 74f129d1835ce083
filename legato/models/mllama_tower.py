"""Mllama's vision tower: the tiles of an image attend to each other, through layers of two kinds.

As in training there are always as many tiles as an image may have, and the patches of each are filled up to a multiple
of eight: what is empty is seen by what is not, and does not see other emptiness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError
from legato.layers.mlp import MLP
from legato.models.keys import Keys
from legato.models.weights import Weights
from legato.vision.rules import Size
from legato.vision.tiles import tile_layouts

INTERMEDIATE = (3, 7, 15, 23, 30)  # layers whose states are features, too
MULTIPLE = 8  # of patches
NORM_EPS = 1e-5  # of the norms before and behind the layers


@dataclass(frozen=True, slots=True)
class MllamaTowerShape:
    width: int
    num_heads: int
    num_layers: int
    num_global_layers: int
    inner: int
    patch: int
    tile: int
    max_tiles: int
    eps: float
    activation: str
    intermediate: tuple[int, ...]

    @classmethod
    def of(cls, keys: Keys) -> MllamaTowerShape:
        shape = cls(
            width=keys.count("hidden_size", default=1280),
            num_heads=keys.count("attention_heads", "num_attention_heads", default=16),
            num_layers=keys.count("num_hidden_layers", default=32),
            num_global_layers=keys.count("num_global_layers", default=8),
            inner=keys.count("intermediate_size", default=5120),
            patch=keys.count("patch_size", default=14),
            tile=keys.count("image_size", default=448),
            max_tiles=keys.count("max_num_tiles", default=4),
            eps=keys.number("norm_eps", default=1e-5),
            activation=keys.text("hidden_act", default="gelu"),
            intermediate=tuple(keys.get("intermediate_layers_indices") or INTERMEDIATE),
        )
        if any(not isinstance(layer, int) or not 0 <= layer < shape.num_layers for layer in shape.intermediate):
            raise ModelFileError(f"{keys.path}: intermediate_layers_indices are not layers: {shape.intermediate}")
        return shape

    @property
    def num_patches(self) -> int:
        """Of a tile, with the token that stands for all of it."""
        return int((self.tile // self.patch) ** 2) + 1

    @property
    def num_features(self) -> int:
        return self.width * (1 + len(self.intermediate))

    @property
    def num_shapes(self) -> int:
        return len(tile_layouts(self.max_tiles))


class MllamaTowerLayer:
    def __init__(self, shape: MllamaTowerShape, weights: Weights, name: str, *, gated: bool) -> None:
        width = shape.width
        self.num_heads = shape.num_heads
        self.norm = weights.layer_norm(f"{name}.input_layernorm", width, shape.eps)
        self.qkv = weights.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], width, width)
        self.output = weights.linear(f"{name}.self_attn.o_proj", width, width)
        self.mlp_norm = weights.layer_norm(f"{name}.post_attention_layernorm", width, shape.eps)
        self.mlp = MLP(
            weights.linear(f"{name}.mlp.fc1", shape.inner, width, bias=True),
            weights.linear(f"{name}.mlp.fc2", width, shape.inner, bias=True),
            shape.activation,
        )
        self.gates: list[torch.Tensor | float] = [1.0, 1.0]
        if gated:
            self.gates = [weights.tensor(f"{name}.gate_{part}", (1,)).tanh() for part in ("attn", "ffn")]

    def __call__(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [N, width]; mask [N, N], true where a token sees another."""
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.output(mixed.transpose(0, 1).flatten(1)) * self.gates[0]
        return x + self.mlp(self.mlp_norm(x)) * self.gates[1]


class TileEmbedding:
    """A vector for each tile of each layout."""

    def __init__(self, shape: MllamaTowerShape, weights: Weights, name: str) -> None:
        size = (shape.num_shapes + 1, shape.max_tiles * shape.width)
        self.table = weights.tensor(f"{name}.embedding.weight", size).unflatten(1, (shape.max_tiles, 1, shape.width))
        self.table = self.table * weights.tensor(f"{name}.gate", (1,)).tanh()

    def __call__(self, x: torch.Tensor, layout: int) -> torch.Tensor:
        """x [tiles, patches, width]"""
        return x + self.table[layout]


class MllamaTower:
    def __init__(self, keys: Keys, weights: Weights, name: str) -> None:
        shape = self.shape = MllamaTowerShape.of(keys)
        width, places = shape.width, f"{name}.gated_positional_embedding"
        self.patches = weights.tensor(f"{name}.patch_embedding.weight", (width, 3, shape.patch, shape.patch)).flatten(1)
        self.first = weights.tensor(f"{name}.class_embedding", (width,))
        gate = weights.tensor(f"{places}.gate", (1,)).tanh()
        self.places = weights.tensor(f"{places}.embedding", (shape.num_patches, width)) * (1 - gate)
        size = (shape.num_shapes + 1, shape.max_tiles * shape.num_patches * width)
        tiles = weights.tensor(f"{places}.tile_embedding.weight", size) * gate
        self.tile_places = tiles.unflatten(1, (shape.max_tiles, shape.num_patches, width))
        self.before, self.behind = (
            TileEmbedding(shape, weights, f"{name}.{place}_tile_positional_embedding") for place in ("pre", "post")
        )
        self.norm, self.last_norm = (
            weights.layer_norm(f"{name}.layernorm_{place}", width, NORM_EPS) for place in ("pre", "post")
        )
        self.layers, self.global_layers = (
            [MllamaTowerLayer(shape, weights, f"{name}.{kind}.layers.{i}", gated=gated) for i in range(count)]
            for kind, count, gated in (
                ("transformer", shape.num_layers, False),
                ("global_transformer", shape.num_global_layers, True),
            )
        )

    def __call__(self, tiles: torch.Tensor, layout: Size) -> torch.Tensor:
        """tiles [n, 3, tile, tile], laid out in rows and columns -> [n patches, num_features]"""
        shape, number = self.shape, tile_layouts(self.shape.max_tiles).index(layout) + 1  # 0: no image
        x = torch.cat((tiles, tiles.new_zeros(shape.max_tiles - len(tiles), *tiles.shape[1:])))
        side = shape.tile // shape.patch
        cut = x.unflatten(3, (side, shape.patch)).unflatten(2, (side, shape.patch))  # [n, 3, row, y, column, x]
        x = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.patches.dtype) @ self.patches.t()
        x = torch.cat((self.first.expand(shape.max_tiles, 1, -1), self.before(x, number)), dim=1)
        x = self.norm((x + self.places + self.tile_places[number]).flatten(0, 1)).unflatten(0, (shape.max_tiles, -1))
        x = F.pad(x, (0, 0, 0, -shape.num_patches % MULTIPLE))
        is_empty = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        is_empty[: len(tiles), : shape.num_patches] = False
        mask = ~(is_empty.flatten()[:, None] & is_empty.flatten())
        x = x.flatten(0, 1)
        features: list[tuple[int, torch.Tensor]] = []
        for i, layer in enumerate(self.layers):
            x = layer(x, mask)
            if i in shape.intermediate:
                features.append((shape.intermediate.index(i), x))
        x = self.behind(self.last_norm(x).unflatten(0, (shape.max_tiles, -1)), number).flatten(0, 1)
        for layer in self.global_layers:
            x = layer(x, mask)
        between = torch.stack([state for _, state in sorted(features, key=lambda item: item[0])], dim=-1).flatten(1)
        seen = torch.cat((x, between), dim=1).unflatten(0, (shape.max_tiles, -1))
        return seen[: len(tiles), : shape.num_patches].flatten(0, 1)
