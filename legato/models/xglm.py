"""XGLM: OPT's layers over a scaled embedding and sinusoidal positions."""

from __future__ import annotations

import math

import torch

from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.positions import LearnedPositions, sinusoids
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.weights import Weights

FIRST_POSITION = 2  # the row of the table that position 0 has
NORM_EPS = 1e-5


class XGLM(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        self.inner, self.activation = keys.count("ffn_dim"), keys.text("activation_function", default="gelu")
        self.scale = math.sqrt(hidden) if keys.flag("scale_embedding", default=True) else 1.0
        is_tied = keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, hidden)
        root = weights.prefix("model.", "embed_tokens.weight")
        self.embedding = weights.embedding(f"{root}embed_tokens", *size)
        weights.skip(f"{root}embed_positions.weights")  # the same table, in the published files
        table = sinusoids(FIRST_POSITION + config.max_positions, hidden)
        padding = keys.get("pad_token_id")
        if isinstance(padding, int) and padding < len(table):
            table[padding] = 0  # not the row of that token but of a position, as the model was trained
        self.positions = LearnedPositions(table.to(weights.device, weights.dtype), offset=FIRST_POSITION)
        self.layers = [
            self._layer(weights, f"{root}layers.{i}", heads) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm(f"{root}layer_norm", hidden, NORM_EPS)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads) -> SequentialLayer:
        hidden = self.config.hidden_size
        return SequentialLayer(
            weights.layer_norm(f"{prefix}.self_attn_layer_norm", hidden, NORM_EPS),
            Attention(
                weights.qkv([f"{prefix}.self_attn.{part}_proj" for part in "qkv"], heads, hidden, bias=True),
                SelfAttention(heads),
                weights.output(f"{prefix}.self_attn.out_proj", heads, hidden, bias=True),
            ),
            weights.layer_norm(f"{prefix}.final_layer_norm", hidden, NORM_EPS),
            MLP(
                weights.column(f"{prefix}.fc1", self.inner, hidden, bias=True),
                weights.row(f"{prefix}.fc2", hidden, self.inner, bias=True),
                self.activation,
            ),
        )

    def embed(self, step: Step) -> torch.Tensor:
        return self.embedding(step.input_ids) * self.scale + self.positions(step.positions)
