"""Learned and sinusoidal position embeddings, and ALiBi."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from legato.layers.shard import Heads


class LearnedPositions:
    """One vector for each position, added to the embedding. OPT's table begins at position -2: `offset=2`."""

    def __init__(self, weight: torch.Tensor, offset: int = 0) -> None:
        self.weight = weight  # [offset + max_positions, hidden]
        self.offset = offset

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)


def sinusoids(num_positions: int, width: int) -> torch.Tensor:
    """[num_positions, width] float32: sines of a position times `width // 2` falling frequencies, then cosines, then 0
    if `width` is odd."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return F.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, width % 2))


def alibi_slopes(heads: Heads, device: torch.device, bias_max: float = 8.0, scale: float = 1.0) -> torch.Tensor:
    """ALiBi's slopes of this shard's heads [num_heads] float32, for `SelfAttention`: one tensor for all layers.

    The slopes fall geometrically from 2^(-bias_max/n) to 2^-bias_max. Where the number of heads is no power of two,
    they are those of the power below, and between them as many of the power above as are missing. `scale` is for
    models that scale scores and penalty together.
    """
    below = 2 ** math.floor(math.log2(heads.all_heads))
    exponents = [bias_max * i / below for i in range(1, below + 1)]
    exponents += [bias_max * i / (2 * below) for i in range(1, 2 * (heads.all_heads - below), 2)]
    slopes = scale * 2.0 ** -torch.tensor(exponents[heads.first : heads.last], dtype=torch.float64)
    return slopes.to(device=device, dtype=torch.float32)
