"""Qwen2.5-VL: Qwen2-VL with another tower.

Its layers have RMS norms and gated MLPs, and in most of them a patch attends only to its window, a square of the
image. Windows at the right and lower edges are smaller. Patches are put in the order of their windows, those of equal
size together, so that a layer is at most four batched products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError
from legato.layers.linear import Linear
from legato.layers.mlp import GatedMLP, Product
from legato.layers.norm import RMSNorm
from legato.models.keys import Keys
from legato.models.qwen2_vl import NORM_EPS, Qwen2VL, Tower, TowerShape
from legato.models.vision import Groups
from legato.models.weights import Weights
from legato.quantization.dense import DenseWeight
from legato.vision.rules import Size

FULL_LAYERS = (7, 15, 23, 31)
# Of the numbers between both products of an MLP: what tiles of a matrix product have.
INNER_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class WindowedShape(TowerShape):
    window: int = 112  # pixels on each side
    full_layers: frozenset[int] = frozenset(FULL_LAYERS)

    @classmethod
    def of(cls, keys: Keys) -> WindowedShape:
        full = keys.get("fullatt_block_indexes")
        full = list(FULL_LAYERS) if full is None else full
        if not isinstance(full, list) or not all(isinstance(layer, int) for layer in full):
            raise ModelFileError(f"{keys.path}: 'fullatt_block_indexes' is {full!r}, not a list of layers")
        return cls(
            depth=keys.count("depth", default=32),
            width=keys.count("hidden_size", default=1280),
            num_heads=keys.count("num_heads", default=16),
            inner=keys.count("intermediate_size", default=3420),
            activation=keys.text("hidden_act", default="silu"),
            patch=keys.count("patch_size", default=14),
            frames=keys.count("temporal_patch_size", default=2),
            channels=keys.count("in_channels", "in_chans", default=3),
            merge=keys.count("spatial_merge_size", default=2),
            theta=keys.below("rope_parameters").number("rope_theta", default=10_000.0),
            window=keys.count("window_size", default=112),
            full_layers=frozenset(full),
        )

    @property
    def cells(self) -> int:
        """On each side of a window."""
        return self.window // self.patch // self.merge


class WindowedTower(Tower):
    shape: WindowedShape

    def _norm(self, weights: Weights, name: str) -> Product:
        return RMSNorm(weights.tensor(f"{name}.weight", (self.shape.width,)), NORM_EPS)

    def _mlp(self, weights: Weights, name: str) -> Product:
        shape, width = self.shape, self.shape.width
        gate_up = weights.linear([f"{name}.gate_proj", f"{name}.up_proj"], shape.inner, width, bias=True)
        down = weights.linear(f"{name}.down_proj", width, shape.inner, bias=True)
        if weights.device.type != "cpu":
            pad_inner(gate_up, down)
        return GatedMLP(gate_up, down, shape.activation)

    def __call__(self, patches: torch.Tensor, grid: Size) -> torch.Tensor:
        cell = self.shape.merge**2
        cells = Size(grid.height // self.shape.merge, grid.width // self.shape.merge)
        by_window, windows = self._windows(cells, patches.device)
        places = (by_window[:, None] * cell + torch.arange(cell, device=patches.device)).flatten()
        x = patches.to(self.patches.dtype)[places] @ self.patches.t()
        cos, sin = (part[places] for part in self.angles(grid))
        whole = [(1, len(x))]
        for i, layer in enumerate(self.layers):
            x = layer(x, whole if i in self.shape.full_layers else windows, (cos, sin))
        merged = self.merger(self.merger_norm(x).view(-1, self.shape.width * cell))
        return torch.empty_like(merged).index_copy_(0, by_window, merged)

    def _windows(self, cells: Size, device: torch.device) -> tuple[torch.Tensor, Groups]:
        """Cells in the order of their windows, and the windows' numbers of patches. On the device throughout: a CUDA
        graph cannot wait for a copy."""
        side = self.shape.cells
        numbers = torch.arange(cells.height * cells.width, device=device).view(cells.height, cells.width)
        tall, wide = (size // side * side for size in (cells.height, cells.width))
        pieces: list[torch.Tensor] = []
        groups: list[tuple[int, int]] = []
        for rows, height in ((numbers[:tall], side), (numbers[tall:], cells.height - tall)):
            for part, width in ((rows[:, :wide], side), (rows[:, wide:], cells.width - wide)):
                if part.numel():
                    windows = part.reshape(len(part) // height, height, -1, width).transpose(1, 2)
                    pieces.append(windows.flatten())
                    groups.append((part.numel() // (height * width), height * width * self.shape.merge**2))
        return torch.cat(pieces), groups


def pad_inner(gate_up: Linear, down: Linear) -> None:
    """Zeros between both products, which change no result. 3,420 numbers of 16 bits are no multiple of 16 bytes, and
    matrix products of such rows are several times slower."""
    first, second = gate_up.weight, down.weight
    if not isinstance(first, DenseWeight) or not isinstance(second, DenseWeight):
        return
    missing = -second.weight.shape[1] % INNER_MULTIPLE
    rows = F.pad(first.weight.unflatten(0, (2, -1)), (0, 0, 0, missing)).flatten(0, 1)
    bias = None if first.bias is None else F.pad(first.bias.unflatten(0, (2, -1)), (0, missing)).flatten()
    gate_up.weight = DenseWeight(rows, bias)
    down.weight = DenseWeight(F.pad(second.weight, (0, missing)), second.bias)


class Qwen25VL(Qwen2VL):
    def make_tower(self, keys: Keys, hidden_size: int, weights: Weights, name: str) -> Tower:
        return WindowedTower(WindowedShape.of(keys), hidden_size, weights, name)
