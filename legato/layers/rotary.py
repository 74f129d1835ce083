"""Rotary position embedding: a table of cosines and sines, and the scalings that stretch it over longer texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.step import Step


@dataclass(frozen=True, slots=True)
class RopeConfig:
    head_dim: int
    theta: float
    max_positions: int
    scaling: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))


class Rotary:
    """cos and sin for every position, computed in fp32 and rounded once to the dtype of the model."""

    def __init__(self, config: RopeConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, attention_factor = rope_frequencies(config)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        # For kernels: [positions, head_dim], cosines and then sines.
        self.cos_sin = torch.cat((cos, sin), dim=-1).to(dtype=dtype, device=device)

    def table(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """For `rotate`: two tensors [T, 1, head_dim], looked up once a step. The sign of a half is in the sine."""
        return step.once(self, lambda: self._look_up(step.positions))

    def _look_up(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin[positions][:, None].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [T, heads, head_dim]. The sign of the swapped half is in `sin` already."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)


def rope_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim / 2] and the factor on the attention scores' tables."""
    scalings = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
    if config.kind not in scalings:
        raise UnsupportedModel(f"rope scaling '{config.kind}' is not supported; known: {', '.join(scalings)}")
    try:
        return scalings[config.kind](config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"config.json: rope scaling '{config.kind}' is incomplete or wrong: {error!r}") from None


def _inverse(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _plain(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _inverse(config.theta, config.head_dim), 1.0


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _inverse(config.theta, config.head_dim) / config.scaling["factor"], 1.0


def _dynamic(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """NTK-aware, for the longest sequence it allows: cached keys must not change as a sequence grows."""
    factor, dim = config.scaling["factor"], config.head_dim
    longest = config.max_positions * factor
    base = config.theta * ((factor * longest / config.max_positions) - (factor - 1)) ** (dim / (dim - 2))
    return _inverse(base, dim), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Long waves are slowed by `factor`, short ones stay, those between are blended."""
    s = config.scaling
    frequencies = _inverse(config.theta, config.head_dim)
    context, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / s["factor"] + blend * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / s["factor"], blended)
    return torch.where(wavelengths < context / high, frequencies, slowed), 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Like llama3's blend, by the number of turns that a dimension makes within the original context."""
    s, dim = config.scaling, config.head_dim
    factor = s["factor"]
    context = s.get("original_max_position_embeddings") or config.max_positions

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = _inverse(config.theta, dim)
    stretched = frequencies / factor * ramp + frequencies * (1 - ramp)
    attention = s.get("attention_factor")
    return stretched, float(attention if attention is not None else 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
