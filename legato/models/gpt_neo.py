"""GPT-Neo: GPT-2 with three projections, scores that are not scaled, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato.common.errors import ModelFileError
from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.positions import LearnedPositions
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.keys import Keys
from legato.models.weights import Weights


class GPTNeo(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.inner = keys.count("intermediate_size", default=4 * config.hidden_size)
        self.eps = keys.number("layer_norm_epsilon", default=1e-5)
        self.activation = keys.text("activation_function", default="gelu_new")
        window, kinds = keys.count("window_size", default=256), _kinds(keys, config.num_layers)
        is_tied = keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "wte.weight")
        self.embedding = weights.embedding(f"{root}wte", *size)
        table = weights.tensor(f"{root}wpe.weight", (config.max_positions, config.hidden_size))
        self.positions = LearnedPositions(table)
        self.layers = [
            self._layer(weights, f"{root}h.{i}", heads, window if kind == "local" else 0)
            for i, kind in enumerate(kinds)
        ]
        self.norm = weights.layer_norm(f"{root}ln_f", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, window: int) -> SequentialLayer:
        hidden, inner, attention = self.config.hidden_size, self.inner, f"{prefix}.attn.attention"
        weights.skip(f"{attention}.bias")  # the causal mask, in the published files
        return SequentialLayer(
            weights.layer_norm(f"{prefix}.ln_1", hidden, self.eps),
            Attention(
                weights.qkv([f"{attention}.{part}_proj" for part in "qkv"], heads, hidden),
                SelfAttention(heads, scale=1.0, window=window),
                weights.output(f"{attention}.out_proj", heads, hidden, bias=True),
            ),
            weights.layer_norm(f"{prefix}.ln_2", hidden, self.eps),
            MLP(
                weights.column(f"{prefix}.mlp.c_fc", inner, hidden, bias=True),
                weights.row(f"{prefix}.mlp.c_proj", hidden, inner, bias=True),
                self.activation,
            ),
        )

    def embed(self, step: Step) -> torch.Tensor:
        return self.embedding(step.input_ids) + self.positions(step.positions)


def _kinds(keys: Keys, num_layers: int) -> Sequence[str]:
    """`global` or `local` for each layer. config.json has patterns, each with how often it is repeated."""
    kinds: list[str] = []
    try:
        for pattern, count in keys.get("attention_types") or [[["global", "local"], num_layers // 2]]:
            kinds += list(pattern) * int(count)
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or set(kinds) - {"global", "local"}:
        raise ModelFileError(f"config.json: 'attention_types' does not say global or local for {num_layers} layers")
    return kinds
