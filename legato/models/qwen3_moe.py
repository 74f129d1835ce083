"""Qwen 3 with experts: norms on queries and keys, and no expert that all tokens read."""

from __future__ import annotations

from dataclasses import replace

from legato.models.config import ModelConfig
from legato.models.llama import LlamaShape
from legato.models.qwen2_moe import QwenExperts


class Qwen3Moe(QwenExperts):
    num_experts = 128
    num_chosen = 8
    expert_size = 768

    def read(self, config: ModelConfig) -> LlamaShape:
        keys = config.keys
        window = keys.count("sliding_window", default=4096) if keys.flag("use_sliding_window") else 0
        return replace(super().read(config), has_head_norms=True, windows=(window,) * config.num_layers)
