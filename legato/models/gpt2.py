"""GPT-2 and its kin: learned positions, matrices stored [in, out], as OpenAI's code had them."""

from __future__ import annotations

import torch

from legato.layers.attention import SelfAttention
from legato.layers.linear import Linear
from legato.layers.mlp import MLP
from legato.layers.positions import LearnedPositions
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.weights import Weights


class GPT2(Decoder):
    """The first SantaCoder says it is a GPT-2, with `attention_head_type` multiquery: one key head for all queries.

    Its successors, which have a name of their own, are `GPTBigCode`.
    """

    transposed = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.is_multi_query = self._is_multi_query(config)
        self.inner = keys.count("n_inner", default=4 * config.hidden_size)
        self.eps = keys.number("layer_norm_epsilon", default=1e-5)
        self.activation = keys.text("activation_function", default="gelu_new")
        self.is_scaled = keys.flag("scale_attn_weights", default=True)
        self.is_scaled_by_layer = keys.flag("scale_attn_by_inverse_layer_idx")
        is_tied = keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, 1 if self.is_multi_query else config.num_heads, config.head_dim)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "wte.weight")
        self.embedding = weights.embedding(f"{root}wte", *size)
        table = weights.tensor(f"{root}wpe.weight", (config.max_positions, config.hidden_size))
        self.positions = LearnedPositions(table)
        self.layers = [self._layer(weights, f"{root}h.{i}", heads, i) for i in weights.shard.layers(config.num_layers)]
        self.norm = weights.layer_norm(f"{root}ln_f", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _is_multi_query(self, config: ModelConfig) -> bool:
        return config.keys.text("attention_head_type", default="multihead") == "multiquery"

    def _layer(self, weights: Weights, prefix: str, heads: Heads, index: int) -> SequentialLayer:
        hidden, inner, transposed = self.config.hidden_size, self.inner, self.transposed
        scale = heads.head_dim**-0.5 if self.is_scaled else 1.0
        if self.is_scaled_by_layer:
            scale /= index + 1
        return SequentialLayer(
            weights.layer_norm(f"{prefix}.ln_1", hidden, self.eps),
            Attention(
                self._qkv(weights, f"{prefix}.attn", heads),
                SelfAttention(heads, scale=scale),
                weights.output(f"{prefix}.attn.c_proj", heads, hidden, bias=True, transposed=transposed),
            ),
            weights.layer_norm(f"{prefix}.ln_2", hidden, self.eps),
            MLP(
                weights.column(f"{prefix}.mlp.c_fc", inner, hidden, bias=True, transposed=transposed),
                weights.row(f"{prefix}.mlp.c_proj", hidden, inner, bias=True, transposed=transposed),
                self.activation,
            ),
        )

    def _qkv(self, weights: Weights, prefix: str, heads: Heads) -> Linear:
        names = [f"{prefix}.q_attn", f"{prefix}.kv_attn"] if self.is_multi_query else f"{prefix}.c_attn"
        return weights.qkv(names, heads, self.config.hidden_size, bias=True, transposed=self.transposed)

    def embed(self, step: Step) -> torch.Tensor:
        return self.embedding(step.input_ids) + self.positions(step.positions)


class GPTBigCode(GPT2):
    """StarCoder, and SantaCoder as transformers has it: mostly one key head for all queries."""

    transposed = False

    def _is_multi_query(self, config: ModelConfig) -> bool:
        return config.keys.flag("multi_query", default=True)

    def _qkv(self, weights: Weights, prefix: str, heads: Heads) -> Linear:
        return weights.qkv(f"{prefix}.c_attn", heads, self.config.hidden_size, bias=True, layout="grouped")
