"""Mistral 7B, Nemo and Small: Llama, in its first version with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaShape

# What a config.json that does not mention it means; later models say null.
WINDOW = 4096


class Mistral(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        shape = LlamaShape.of(config)
        if config.keys.raw.get("sliding_window", WINDOW) is None:
            return shape
        window = config.keys.count("sliding_window", default=WINDOW)
        return replace(shape, windows=(window,) * config.num_layers)
