"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values, later with norms on queries and keys instead.

A sliding window is off unless config.json switches it on, and then for the upper layers.
"""

from __future__ import annotations

from dataclasses import replace

from legato.models.config import ModelConfig
from legato.models.llama import Llama, LlamaShape


class Qwen2(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), qkv_bias=True, output_bias=False, windows=_windows(config))


class Qwen3(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), has_head_norms=True, windows=_windows(config))


def _windows(config: ModelConfig) -> tuple[int, ...]:
    keys = config.keys
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return ()
    first = keys.number("max_window_layers", default=28)
    return config.windows(keys.count("sliding_window"), lambda layer: layer >= first)
