"""Gemma 1 to 3, the language part.

All have norms around one, an embedding scaled by the root of its width, and a head that is the embedding. Gemma 2 adds
norms behind attention and MLP, soft caps on scores and logits, and a sliding window in every other layer. Gemma 3 has
norms on queries and keys instead of caps, and the layers with a window turn by frequencies of their own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from legato.layers.kv_cache import LayerCache
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.weights import Weights

ACTIVATION = "gelu_pytorch_tanh"


class Gemma(Llama):
    is_tied = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        # Rounded to the model's precision, as it was in training.
        self.embedding_factor = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
        super().__init__(config, weights)

    def read(self, config: ModelConfig) -> LlamaShape:
        activation = config.keys.text("hidden_act", default=ACTIVATION)
        # The first checkpoints say "gelu", and were trained with its approximation.
        activation = ACTIVATION if activation == "gelu" else activation
        return replace(LlamaShape.of(config), norm_offset=1.0, activation=activation)

    def embed(self, step: Step) -> torch.Tensor:
        return super().embed(step).mul_(self.embedding_factor)


class Gemma2Layer:
    """Norms before and behind attention, before and behind the MLP."""

    def __init__(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> None:
        self.norm = parts.norm(f"{name}.input_layernorm")
        self.attention = parts.attention(f"{name}.self_attn", rotary, window)
        self.attended_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp_norm = parts.norm(f"{name}.pre_feedforward_layernorm")
        self.mlp = parts.mlp(f"{name}.mlp")
        self.output_norm = parts.norm(f"{name}.post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm.add(x, residual)
        attended = self.attended_norm(self.attention(normed, cache, step))
        normed, residual = self.mlp_norm.add(attended, step.needed_after_attention(residual))
        return self.output_norm(self.mlp(normed)), residual


class Gemma2(Gemma):
    # Unless config.json says otherwise. Of the caps 0 is none.
    score_cap = 50.0
    logits_cap = 30.0
    full_every = 2  # each such layer sees everything, those between the window

    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        every = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=self.full_every)
        window = keys.count("sliding_window", default=4096)
        self.logits_cap = _cap(keys, "final_logit_softcapping", self.logits_cap)
        return replace(
            super().read(config),
            activation=keys.text("hidden_activation", default=ACTIVATION),
            windows=config.windows(window, lambda layer: (layer + 1) % every != 0),
            scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
            soft_cap=_cap(keys, "attn_logit_softcapping", self.score_cap),
        )

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return Gemma2Layer(parts, name, rotary, window)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().logits(hidden), self.logits_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class Gemma3(Gemma2):
    """The language model, also of vision checkpoints (`gemma_vision.py`)."""

    score_cap = 0.0
    logits_cap = 0.0
    full_every = 6

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.prefix = language_prefix(weights)
        self.local_rotary = Rotary(_local_rope(config), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights)

    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(super().read(config), has_head_norms=True)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(layer_type="full_attention", default_theta=1e6)

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return super().layer(parts, name, self.local_rotary if window else rotary, window)


def language_prefix(weights: Weights) -> str:
    """Of the names of the language model: checkpoints with a vision tower have had it in two places."""
    places = ("model.language_model", "language_model.model", "model")
    return next((place for place in places if f"{place}.embed_tokens.weight" in weights), "model")


def _cap(keys: Keys, name: str, default: float) -> float:
    return 0.0 if keys.raw.get(name, default) is None else keys.number(name, default=default)


def _local_rope(config: ModelConfig) -> RopeConfig:
    """Of layers with a window. What stretches the context, here or with --rope-scaling, is for the others only."""
    parameters = config.keys.below("rope_parameters").below("sliding_attention")
    theta = config.keys.number("rope_local_base_freq", default=1e4)
    return RopeConfig(
        config.head_dim, parameters.number("rope_theta", default=theta), config.max_positions, parameters.raw
    )
