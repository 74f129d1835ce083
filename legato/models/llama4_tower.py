"""Llama 4's vision tower: patches know their row and column by rotation and by a learned vector, and four make a token.

A token for the whole tile is behind the patches, and left out in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.layers.mlp import MLP
from legato.models.keys import Keys
from legato.models.vision import Angles, Groups, TowerAttention, TowerLayer
from legato.models.weights import Weights

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Llama4TowerShape:
    width: int
    num_heads: int
    num_layers: int
    inner: int
    patch: int
    tile: int
    theta: float
    ratio: float
    projected: int  # width between the two matrices behind the layers
    num_features: int

    @classmethod
    def of(cls, keys: Keys) -> Llama4TowerShape:
        return cls(
            width=keys.count("hidden_size", default=768),
            num_heads=keys.count("num_attention_heads", default=16),
            num_layers=keys.count("num_hidden_layers", default=34),
            inner=keys.count("intermediate_size", default=5632),
            patch=keys.count("patch_size", default=14),
            tile=keys.count("image_size", default=448),
            theta=keys.below("rope_parameters").number("rope_theta", default=keys.number("rope_theta", default=1e4)),
            ratio=keys.number("pixel_shuffle_ratio", default=0.5),
            projected=keys.count("projector_input_dim", default=4096),
            num_features=keys.count("projector_output_dim", default=4096),
        )

    @property
    def side(self) -> int:
        return self.tile // self.patch


class RotaryTowerAttention(TowerAttention):
    """Full attention within each tile, with rotary embeddings that rotate neighbouring dimensions of a head."""

    def __call__(self, x: torch.Tensor, groups: Groups, angles: Angles | None) -> torch.Tensor:
        assert angles is not None
        ((count, _),) = groups
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unflatten(0, (count, -1)).unbind(2)
        q, k = (_turned(part, *angles) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.output(mixed.transpose(1, 2).flatten(2).flatten(0, 1))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, patches, heads, head_dim]"""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).to(x.dtype)


class Llama4Tower:
    def __init__(self, keys: Keys, weights: Weights, name: str) -> None:
        shape = self.shape = Llama4TowerShape.of(keys)
        width, places = shape.width, shape.side**2 + 1
        self.patches = weights.tensor(f"{name}.patch_embedding.linear.weight", (width, 3 * shape.patch**2))
        self.last = weights.tensor(f"{name}.class_embedding", (width,))
        self.places = weights.tensor(f"{name}.positional_embedding_vlm", (places, width))
        self.norm, self.last_norm = (
            weights.layer_norm(f"{name}.layernorm_{place}", width, NORM_EPS) for place in ("pre", "post")
        )
        self.layers = [self._layer(weights, f"{name}.model.layers.{i}") for i in range(shape.num_layers)]
        adapter = f"{name}.vision_adapter.mlp"
        self.adapter = MLP(
            weights.linear(f"{adapter}.fc1", shape.projected, int(width / shape.ratio**2)),
            weights.linear(f"{adapter}.fc2", shape.num_features, shape.projected),
            "gelu",
        )
        self.angles = self._angles(weights.device)

    def _layer(self, weights: Weights, name: str) -> TowerLayer:
        width, inner = self.shape.width, self.shape.inner
        attention = RotaryTowerAttention(
            weights.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], width, width, bias=True),
            weights.linear(f"{name}.self_attn.o_proj", width, width, bias=True),
            self.shape.num_heads,
        )
        mlp = MLP(
            weights.linear(f"{name}.mlp.fc1", inner, width, bias=True),
            weights.linear(f"{name}.mlp.fc2", width, inner, bias=True),
            "gelu",
        )
        return TowerLayer(
            weights.layer_norm(f"{name}.input_layernorm", width, NORM_EPS),
            attention,
            weights.layer_norm(f"{name}.post_attention_layernorm", width, NORM_EPS),
            mlp,
        )

    def _angles(self, device: torch.device) -> Angles:
        """[patches + 1, 1, head_dim / 2]: columns in the first half, rows in the second, none for the last token."""
        shape, side = self.shape, self.shape.side
        dim = shape.width // shape.num_heads // 2
        frequencies = 1.0 / shape.theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
        place = torch.arange(side**2)
        angles = [(axis + 1)[:, None] * frequencies for axis in (place % side, place // side)]
        both = F.pad(torch.cat(angles, dim=1), (0, 0, 0, 1))[:, None].to(device)
        return both.cos(), both.sin()

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """tiles [n, 3, tile, tile] -> [n, tokens, num_features]"""
        shape, side = self.shape, self.shape.side
        cut = tiles.unflatten(3, (side, shape.patch)).unflatten(2, (side, shape.patch))  # [n, 3, row, y, column, x]
        x = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.patches.dtype) @ self.patches.t()
        x = torch.cat((x, self.last.expand(len(tiles), 1, -1)), dim=1) + self.places
        groups = [(len(tiles), x.shape[1])]
        x = self.norm(x.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, groups, self.angles)
        seen = self.last_norm(x).unflatten(0, groups[0])[:, :-1]
        return F.gelu(self.adapter(self._merged(seen)))

    def _merged(self, x: torch.Tensor) -> torch.Tensor:
        """Four patches of each square side by side, in the order of training: [n, patches / 4, 4 width]."""
        side, small = self.shape.side, int(self.shape.side * self.shape.ratio)
        count = len(x)
        rows = x.reshape(count, side, small, -1).transpose(1, 2).contiguous()
        return rows.view(count, small, small, -1).transpose(1, 2).contiguous().view(count, small**2, -1)
