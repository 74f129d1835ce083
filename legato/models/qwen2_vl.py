"""Qwen2-VL: Qwen 2 with a vision tower.

The tower reads patches of any number, which know their row and column by rotation, and merges each cell of them into
one token. In the language model every token has three positions: in time, in height and in width. Those of text are
equal; an image takes as many as its longer side, so that the text behind it goes on at a smaller position than its
place in the sequence. The difference, a row's shift, stays for the rest of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from legato.common.errors import ModelFileError
from legato.layers.kv_cache import KVCache
from legato.layers.mlp import MLP, Product
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.keys import Keys
from legato.models.llama import LlamaParts
from legato.models.qwen import Qwen2
from legato.models.vision import Angles, ImageSpan, TowerAttention, TowerLayer
from legato.models.weights import Weights
from legato.vision.rules import Size

NORM_EPS = 1e-6
# Of heads of 128 dimensions, where config.json does not say.
SECTIONS = (16, 24, 24)


@dataclass(frozen=True, slots=True)
class TowerShape:
    depth: int
    width: int
    num_heads: int
    inner: int
    activation: str
    patch: int
    frames: int
    channels: int
    merge: int
    theta: float

    @classmethod
    def of(cls, keys: Keys) -> TowerShape:
        width = keys.count("embed_dim", default=1280)
        return cls(
            depth=keys.count("depth", default=32),
            width=width,
            num_heads=keys.count("num_heads", default=16),
            inner=int(width * keys.number("mlp_ratio", default=4)),
            activation=keys.text("hidden_act", default="quick_gelu"),
            patch=keys.count("patch_size", default=14),
            frames=keys.count("temporal_patch_size", default=2),
            channels=keys.count("in_channels", "in_chans", default=3),
            merge=keys.count("spatial_merge_size", default=2),
            theta=keys.below("rope_parameters").number("rope_theta", default=10_000.0),
        )

    @property
    def patch_size(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.frames * self.patch * self.patch


class Tower:
    def __init__(self, shape: TowerShape, hidden_size: int, weights: Weights, name: str) -> None:
        self.shape = shape
        kernel = (shape.width, shape.channels, shape.frames, shape.patch, shape.patch)
        # A convolution whose steps are as long as its kernel is a product.
        self.patches = weights.tensor(f"{name}.patch_embed.proj.weight", kernel).flatten(1)
        self.layers = [self._layer(weights, f"{name}.blocks.{i}") for i in range(shape.depth)]
        self.merger_norm, self.merger = self.make_merger(weights, f"{name}.merger", hidden_size)
        quarter = shape.width // shape.num_heads // 4
        powers = torch.arange(quarter, dtype=torch.float32, device=weights.device) / quarter
        self.frequencies = shape.theta**-powers

    def _layer(self, weights: Weights, name: str) -> TowerLayer:
        width = self.shape.width
        return TowerLayer(
            self._norm(weights, f"{name}.norm1"),
            TowerAttention(
                weights.linear(f"{name}.attn.qkv", 3 * width, width, bias=True),
                weights.linear(f"{name}.attn.proj", width, width, bias=True),
                self.shape.num_heads,
            ),
            self._norm(weights, f"{name}.norm2"),
            self._mlp(weights, f"{name}.mlp"),
        )

    def make_merger(self, weights: Weights, name: str, hidden_size: int) -> tuple[Product, Product]:
        cell = self.shape.width * self.shape.merge**2
        merger = MLP(
            weights.linear(f"{name}.mlp.0", cell, cell, bias=True),
            weights.linear(f"{name}.mlp.2", hidden_size, cell, bias=True),
            "gelu",
        )
        return self._norm(weights, f"{name}.ln_q"), merger

    def _norm(self, weights: Weights, name: str) -> Product:
        return weights.layer_norm(name, self.shape.width, NORM_EPS)

    def _mlp(self, weights: Weights, name: str) -> Product:
        shape, width = self.shape, self.shape.width
        return MLP(
            weights.linear(f"{name}.fc1", shape.inner, width, bias=True),
            weights.linear(f"{name}.fc2", width, shape.inner, bias=True),
            shape.activation,
        )

    def __call__(self, patches: torch.Tensor, grid: Size) -> torch.Tensor:
        """patches [N, patch_size], cell by cell; `grid` in patches -> [N / merge², hidden_size]."""
        x = patches.to(self.patches.dtype) @ self.patches.t()
        angles = self.angles(grid)
        for layer in self.layers:
            x = layer(x, [(1, len(x))], angles)
        return self.merger(self.merger_norm(x).view(-1, self.shape.width * self.shape.merge**2))

    def by_cells(self, values: torch.Tensor) -> torch.Tensor:
        """[height, width, …] of a grid -> [height width, …] in the patches' order."""
        merge = self.shape.merge
        return values.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)

    def angles(self, grid: Size) -> Angles:
        """Half of a head turns with the row of its patch, half with the column; in the patches' order."""
        device = self.frequencies.device
        rows = torch.arange(grid.height, device=device)[:, None].expand(grid.height, grid.width)
        columns = torch.arange(grid.width, device=device)[None].expand(grid.height, grid.width)
        rows, columns = self.by_cells(rows), self.by_cells(columns)
        turns = torch.stack((rows, columns), dim=1)[:, :, None] * self.frequencies  # [N, 2, quarter]
        return turns.flatten(1).cos(), turns.flatten(1).sin()


class AxesRotary(Rotary):
    """Angles of tokens with a position on each of three axes; every pair of dimensions turns with one of them."""

    def __init__(self, plain: Rotary, axes: torch.Tensor, positions: Callable[[Step], torch.Tensor]) -> None:
        """`axes` [head_dim / 2]; `positions` returns [T], where they are the same on all axes, or [3, T]."""
        self.dim, self._config, self.cos_sin = plain.dim, plain._config, plain.cos_sin
        self._axes, self._positions = axes, positions

    def angles(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        return step.once((self, "angles"), lambda: self._angles(self._positions(step)))

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if positions.dim() == 1:
            return positions, self.cos_sin
        pairs = torch.arange(len(self._axes), device=positions.device)
        both = self.cos_sin[positions].chunk(2, dim=-1)  # [3, T, dim / 2] each
        cos, sin = (part[self._axes, :, pairs].t() for part in both)
        return torch.arange(positions.shape[1], device=positions.device), torch.cat((cos, sin), dim=-1)


class Qwen2VL(Qwen2):
    position_shifts: torch.Tensor | None = None
    has_graphed_tower = True
    default_sections = SECTIONS

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        # The axis of each pair of dimensions.
        self.axes = torch.tensor(self.make_axes(_sections(config, self.default_sections)), device=weights.device)
        self.axes_rotary: AxesRotary | None = None
        self.prefix = "model" if "model.embed_tokens.weight" in weights else "model.language_model"
        super().__init__(config, weights)
        name = "visual" if "visual.patch_embed.proj.weight" in weights else "model.visual"
        self.tower = self.make_tower(config.keys.below("vision_config"), config.hidden_size, weights, name)

    def make_axes(self, sections: Sequence[int]) -> list[int]:
        """The axis of each pair of a head's dimensions."""
        return [axis % 3 for axis, count in enumerate(sections) for _ in range(count)]

    def make_tower(self, keys: Keys, hidden_size: int, weights: Weights, name: str) -> Tower:
        return Tower(TowerShape.of(keys), hidden_size, weights, name)

    def rope(self, config: ModelConfig) -> RopeConfig:
        """Whatever the number of axes, the angles are the usual ones."""
        rope = config.rope(default_theta=1e6)
        return replace(rope, scaling={}) if rope.kind == "mrope" else rope

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        if self.axes_rotary is None:  # one for all layers, for its table
            self.axes_rotary = AxesRotary(rotary, self.axes, self.positions)
        return super().layer(parts, name, self.axes_rotary, window)

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        if self.axes_rotary is not None:
            self.axes_rotary.angles(step)  # before the layers, whose kernels read them early
        return super().forward(step, cache)

    def positions(self, step: Step) -> torch.Tensor:
        """[3, T], or [T] in a step without images, which has positions of text, or decodes after images."""
        if step.images is not None and step.images.positions is not None:
            return step.images.positions
        positions = step.positions
        if self.position_shifts is not None:
            positions = positions + self.position_shifts[step.rows]
        return positions

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        merge = self.tower.shape.merge
        return self.tower(pixels, Size(shape.height * merge, shape.width * merge))

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> np.ndarray:
        """Text continues after the largest position so far; an image's tokens have its rows and columns from there."""
        positions = np.empty((3, num_tokens), dtype=np.int64)
        first, position = 0, 0
        for image in images:
            count = image.start - first
            positions[:, first : image.start] = np.arange(position, position + count)
            position += count
            first = image.start + image.num_tokens
            rows, columns = np.indices((image.shape.height, image.shape.width)).reshape(2, -1)
            positions[:, image.start : first] = position + np.stack((np.zeros_like(rows), rows, columns))
            position += max(image.shape.height, image.shape.width)
        positions[:, first:] = np.arange(position, position + num_tokens - first)
        return positions


def _sections(config: ModelConfig, default: Sequence[int]) -> Sequence[int]:
    """Pairs of a head's dimensions that turn with time, with height and with width."""
    sections = config.keys.below("rope_parameters", "rope_scaling").get("mrope_section") or default
    if not all(isinstance(count, int) for count in sections) or 2 * sum(sections) != config.head_dim:
        raise ModelFileError(
            f"config.json: mrope_section is {sections}, which is not half of a head of {config.head_dim}"
        )
    return list(sections)
