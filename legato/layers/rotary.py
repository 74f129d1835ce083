"""Rotary position embedding: a table of cosines and sines, and the scalings for longer contexts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`ModelConfig.rope` reads it from config.json."""

    dim: int  # of a head, those that turn: all of them, or the first ones
    theta: float
    trained_positions: int
    scaling: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    @property
    def is_long(self) -> bool:
        """Whether there are two sets of divisors. `su` is the old name of `longrope` in Phi-3."""
        return self.kind in ("longrope", "su")

    def chosen(self, longest: int) -> str:
        """The set of divisors for sequences of up to `longest` tokens."""
        return "long" if longest > int(self.scaling["original_max_position_embeddings"]) else "short"


class Rotary:
    """cos and sin for every position, computed in fp32 and rounded once to the dtype of the model.

    Dimension i of a head turns with dimension i + dim/2. Checkpoints that turn neighbours (GPT-J) have their rows put
    into this order when they are read (`Weights.qkv`). Layers that turn alike share one Rotary.
    """

    def __init__(self, config: RopeConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim = config.dim
        self._config = config
        # For kernels: [positions, dim], cosines and then sines.
        self.cos_sin = _table(config, num_positions, num_positions).to(dtype=dtype, device=device)

    def limit(self, longest: int) -> None:
        """Set the maximum sequence length, in place. The KV cache must be empty: cached keys would keep the old
        rotation."""
        if self._config.is_long:
            self.cos_sin.copy_(_table(self._config, len(self.cos_sin), longest))
            logger.info(
                "Sequences of up to %d tokens: using the %s RoPE factors", longest, self._config.chosen(longest)
            )

    def turn(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Rotate x [T, heads, head_dim]; dimensions from `dim` on are unchanged."""
        cos, sin = step.once(self, lambda: _both_halves(*self.angles(step)))
        if x.shape[-1] == self.dim:
            return rotate(x, cos, sin)
        return torch.cat((rotate(x[..., : self.dim], cos, sin), x[..., self.dim :]), dim=-1)

    def angles(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """For kernels: a table like `cos_sin`, and the row of each token in it [T]. Nothing may write them from the
        first layer on."""
        return step.positions, self.cos_sin

    def look_up(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `rotate`, for tokens at these positions."""
        return _both_halves(positions, self.cos_sin)


def _both_halves(positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For `rotate`: two tensors [T, 1, dim]. The sign of a half is in the sine."""
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, dim]. The sign of the swapped half is in `sin` already.

    Both products are rounded before they are added, as transformers does; a fused sum shows in the logits.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


def _table(config: RopeConfig, num_positions: int, longest: int) -> torch.Tensor:
    angles, factor = rope_angles(config, num_positions, longest)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def rope_angles(config: RopeConfig, num_positions: int, longest: int) -> tuple[torch.Tensor, float]:
    """Angles [num_positions, dim / 2] and the factor on their cosines and sines, for sequences of up to `longest`."""
    scalings = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
    known = [*scalings, "longrope"]
    if not config.is_long and config.kind not in scalings:
        raise UnsupportedModel(f"rope scaling '{config.kind}' is not supported; known: {', '.join(known)}")
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    try:
        frequencies, factor = _longrope(config, longest) if config.is_long else scalings[config.kind](config)
        return positions * frequencies, factor
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ModelFileError(f"config.json: rope scaling '{config.kind}' is incomplete or wrong: {error!r}") from None


def _inverse(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _plain(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _inverse(config.theta, config.dim), 1.0


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _inverse(config.theta, config.dim) / config.scaling["factor"], 1.0


def _dynamic(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """NTK-aware, for the longest sequence it allows: cached keys must not change as a sequence grows."""
    factor, dim = config.scaling["factor"], config.dim
    longest = config.trained_positions * factor
    base = config.theta * ((factor * longest / config.trained_positions) - (factor - 1)) ** (dim / (dim - 2))
    return _inverse(base, dim), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Low frequencies are divided by `factor`, high ones are unchanged, those between are interpolated."""
    s = config.scaling
    frequencies = _inverse(config.theta, config.dim)
    context, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / s["factor"] + blend * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / s["factor"], blended)
    return torch.where(wavelengths < context / high, frequencies, slowed), 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Interpolated like llama3, by the number of rotations within the original context."""
    s, dim = config.scaling, config.dim
    factor = s["factor"]
    context = s.get("original_max_position_embeddings") or config.trained_positions

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
    if attention is None and s.get("mscale") and s.get("mscale_all_dim"):  # DeepSeek's: the scores have the rest
        attention = yarn_factor(factor, s["mscale"]) / yarn_factor(factor, s["mscale_all_dim"])
    return stretched, float(attention if attention is not None else yarn_factor(factor))


def yarn_factor(stretch: float, weight: float = 1.0) -> float:
    """Attention temperature for longer contexts."""
    return 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1 else 1.0


def _longrope(config: RopeConfig, longest: int) -> tuple[torch.Tensor, float]:
    """Two sets of divisors: one for sequences within the original context, one for longer ones.

    transformers changes the set when a text grows out of that context, and computes all of its keys again. Keys in a
    cache that other texts share cannot change, so here one set serves them all: that of the longest text there may be.
    """
    s, original = config.scaling, int(config.scaling["original_max_position_embeddings"])
    divisors = {name: torch.tensor(s[f"{name}_factor"]) for name in ("short", "long")}
    stretch = s.get("factor") or config.trained_positions / original
    chosen = config.chosen(longest)
    attention = s.get(f"{chosen}_mscale", s.get("attention_factor"))  # PhiMoE has one for each set
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return _inverse(config.theta, config.dim) / divisors[chosen], float(attention)
