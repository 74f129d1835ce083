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

from legato.kernels.patch_rotary import rotate_patches
from legato.layers.kv_cache import KVCache
from legato.layers.mlp import Product
from legato.models.registry import CausalModel
from legato.vision.rules import ImageRules, Size

# Cosines and sines [N, head_dim / 2], float32.
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


# How many groups of patches attend among themselves, and how many patches each of them has.
Groups = Sequence[tuple[int, int]]


@runtime_checkable
class WithImageTokens(Protocol):
    """A `VisionModel` whose images have tokens of text among theirs."""

    image_rules: ImageRules | None  # written by the server, whose tokenizer they know


@runtime_checkable
class GraphedTower(Protocol):
    """A `VisionModel` whose `encode_image` asks nothing of the host, so that CUDA graphs can repeat it."""

    has_graphed_tower: bool


@runtime_checkable
class MutualModel(Protocol):
    """A `VisionModel` with tokens that see those behind them: one step must compute them together."""

    whole_prompts: bool  # all tokens of a prompt do; else the tokens of each image

    def groups(self, num_prompt: int, images: Sequence[ImageSpan]) -> list[tuple[int, int]]:
        """[begin, end) of the tokens of a prompt that see each other."""
        ...


@runtime_checkable
class CrossModel(Protocol):
    """A `VisionModel` whose images are not in the text: some layers attend to them (`legato/vision/cross.py`)."""

    sees_runs: bool  # tokens see all images that stand beside each other before them; else the last one alone

    def store_images(self, states: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        """Write the keys and values of the embeddings [k, hidden_size] of images to the slots [k]."""
        ...


class TowerAttention:
    """Full attention between the patches of an image, or of a part of it."""

    def __init__(self, qkv: Product, output: Product, num_heads: int) -> None:
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads

    def __call__(self, x: torch.Tensor, groups: Groups, angles: Angles | None) -> torch.Tensor:
        """x [T, width]: the patches of one group after the other."""
        qkv = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1))  # [T, heads of q, k and v, head_dim]
        if angles is not None:
            rotate_patches(qkv[:, : 2 * self.num_heads], *angles)
        q, k, v = qkv.split(self.num_heads, dim=1)
        sizes = [count * size for count, size in groups]
        parts = zip(groups, *(part.split(sizes) for part in (q, k, v)), strict=True)
        attended = [self._attend(count, *qkv) for (count, _), *qkv in parts]
        return self.output(attended[0] if len(attended) == 1 else torch.cat(attended))

    @staticmethod
    def _attend(count: int, *qkv: torch.Tensor) -> torch.Tensor:
        """[count size, heads, head_dim] each -> [count size, width]"""
        heads_first = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in qkv)
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2).flatten(2).flatten(0, 1)


class TowerLayer:
    def __init__(self, norm: Product, attention: TowerAttention, mlp_norm: Product, mlp: Product) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: torch.Tensor, groups: Groups, angles: Angles | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), groups, angles)
        return x + self.mlp(self.mlp_norm(x))
