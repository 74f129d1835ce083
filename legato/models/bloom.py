"""BLOOM and BLOOMZ: ALiBi, a norm on the embedding, queries, keys and values fused head by head."""

from __future__ import annotations

import torch

from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import LayerCache
from legato.layers.mlp import MLP
from legato.layers.positions import alibi_slopes
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.weights import Weights


class NormedResidualLayer(SequentialLayer):
    """`apply_residual_connection_post_layernorm`: the stream goes on from the normed input, not from the input."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, _ = self.norm.add(x, residual)
        normed, _ = self.mlp_norm.add(self.attention(normed, cache, step), step.needed_after_attention(normed))
        return self.mlp(normed), normed


class Bloom(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.eps = keys.number("layer_norm_epsilon", default=1e-5)
        is_normed = keys.flag("apply_residual_connection_post_layernorm")
        self.make_layer = NormedResidualLayer if is_normed else SequentialLayer
        is_tied = keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "word_embeddings.weight")
        self.embedding = weights.embedding(f"{root}word_embeddings", *size)
        self.embedding_norm = weights.layer_norm(f"{root}word_embeddings_layernorm", config.hidden_size, self.eps)
        slopes = alibi_slopes(heads, weights.device)
        self.layers = [
            self._layer(weights, f"{root}h.{i}", heads, slopes) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm(f"{root}ln_f", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, slopes: torch.Tensor) -> SequentialLayer:
        hidden, attention = self.config.hidden_size, f"{prefix}.self_attention"
        return self.make_layer(
            weights.layer_norm(f"{prefix}.input_layernorm", hidden, self.eps),
            Attention(
                weights.qkv(f"{attention}.query_key_value", heads, hidden, bias=True, layout="grouped"),
                SelfAttention(heads, slopes=slopes),
                weights.output(f"{attention}.dense", heads, hidden, bias=True),
            ),
            weights.layer_norm(f"{prefix}.post_attention_layernorm", hidden, self.eps),
            MLP(
                weights.column(f"{prefix}.mlp.dense_h_to_4h", 4 * hidden, hidden, bias=True),
                weights.row(f"{prefix}.mlp.dense_4h_to_h", hidden, 4 * hidden, bias=True),
                "gelu_new",
            ),
        )

    def embed(self, step: Step) -> torch.Tensor:
        return self.embedding_norm(self.embedding(step.input_ids))
