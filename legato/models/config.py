"""A checkpoint's config.json, normalised once, so that no layer asks for a default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.rotary import RopeConfig

# Beyond any model's vocabulary or context; a table of that many positions can still be made.
LARGEST_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModel(
                f"config.json says the weights are quantised ('{method}'), which is not supported yet"
            )
        num_heads = _count(config, "num_attention_heads")
        head_dim = _count(config, "head_dim", _count(config, "hidden_size") // num_heads)
        max_positions = _count(config, "max_position_embeddings", 2048)
        # transformers 5 writes everything about rope into one dictionary; before, it was two keys.
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
        return cls(
            model_type=str(config.get("model_type")),
            vocab_size=_count(config, "vocab_size"),
            hidden_size=_count(config, "hidden_size"),
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=RopeConfig(head_dim, theta, max_positions, rope),
            max_positions=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            activation=str(config.get("hidden_act") or "silu"),
        )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size: there, or with a default, and a positive whole number of which tensors can be made."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelFileError(f"config.json has no '{key}'")
    if not isinstance(value, int) or not 0 < value <= LARGEST_SIZE:
        raise ModelFileError(f"config.json: '{key}' is {value!r}, not a number from 1 to {LARGEST_SIZE}")
    return value
