"""GPT-BigCode: StarCoder, and SantaCoder as transformers has it. A GPT-2, mostly with one key head for all queries."""

from __future__ import annotations

from legato.layers.linear import Linear
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.gpt2 import GPT2
from legato.models.weights import Weights


class GPTBigCode(GPT2):
    transposed = False

    def _is_multi_query(self, config: ModelConfig) -> bool:
        return config.keys.flag("multi_query", default=True)

    def _qkv(self, weights: Weights, prefix: str, heads: Heads) -> Linear:
        return weights.qkv(f"{prefix}.c_attn", heads, self.config.hidden_size, bias=True, layout="grouped")
