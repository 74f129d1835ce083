"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama from fused matrices, with two sets of frequencies for long contexts."""

from __future__ import annotations

from dataclasses import replace

from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaShape


class Phi3(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        windows = () if keys.get("sliding_window") is None else (keys.count("sliding_window"),) * config.num_layers
        return replace(
            LlamaShape.of(config),
            norm_eps=keys.number("rms_norm_eps", default=1e-5),
            windows=windows,
            is_fused=True,
        )
