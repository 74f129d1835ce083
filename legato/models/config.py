"""A checkpoint's config.json, normalised once, so that no layer asks for a default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legato.common.errors import ModelFileError
from legato.layers.rotary import RopeConfig


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
        def need(key: str) -> Any:
            if config.get(key) is None:
                raise ModelFileError(f"config.json has no '{key}'")
            return config[key]

        num_heads = int(need("num_attention_heads"))
        head_dim = int(config.get("head_dim") or need("hidden_size") // num_heads)
        max_positions = int(config.get("max_position_embeddings") or 2048)
        # transformers 5 writes everything about rope into one dictionary; before, it was two keys.
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
        return cls(
            model_type=need("model_type"),
            vocab_size=int(need("vocab_size")),
            hidden_size=int(need("hidden_size")),
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=RopeConfig(head_dim, theta, max_positions, rope),
            max_positions=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            activation=str(config.get("hidden_act") or "silu"),
        )
