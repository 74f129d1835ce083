"""What vision models have in common: the protocol for the server, and the blocks of vision transformers.

A tower is whole on every shard: it is small beside the language model, and its results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F

from legato.layers.mlp import Product
from legato.layers.norm import LayerNorm
from legato.layers.rotary import rotate
from legato.models.registry import CausalModel
from legato.vision.rules import Size

# Cosines and sines [N, 1, head_dim] for `rotate`.
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where the tokens of an image are in their sequence, and its shape as the family's rules have it."""

    start: int
    num_tokens: int
    shape: Size


@runtime_checkable
class VisionModel(CausalModel, Protocol):
    """A `CausalModel` whose embeddings of some tokens come from images (`Step.images`)."""

    # [rows] int64 on the device: what is added to the position of a row's decoded tokens. Written by the server; a
    # model of one axis never reads it.
    position_shifts: torch.Tensor | None

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """The embeddings of one image: [num_tokens, hidden_size]. `pixels` are as the
        server's preprocessing has them, `shape` is that of `ImageSpan`."""
        ...

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> np.ndarray | None:
        """Positions [3, num_tokens] of a sequence with these images; None if they are those of text."""
        ...


class TowerAttention:
    """Full attention between the patches of an image."""

    def __init__(self, qkv: Product, output: Product, num_heads: int) -> None:
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads

    def __call__(self, x: torch.Tensor, num_images: int, angles: Angles | None) -> torch.Tensor:
        """x [T, width]: the patches of images of equal size."""
        apart = self.qkv(x).unflatten(0, (num_images, -1)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = apart.unbind(-3)  # [images, patches, heads, head_dim] each
        if angles is not None:
            cos, sin = angles
            q, k = (rotate(part.float(), cos, sin).to(v.dtype) for part in (q, k))
        heads_first = (part.transpose(-3, -2) for part in (q, k, v))
        return self.output(F.scaled_dot_product_attention(*heads_first).transpose(-3, -2).flatten(-2).flatten(0, 1))


class TowerLayer:
    def __init__(self, norm: LayerNorm, attention: TowerAttention, mlp_norm: LayerNorm, mlp: Product) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, num_images: int = 1, angles: Angles | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), num_images, angles)
        return x + self.mlp(self.mlp_norm(x))
