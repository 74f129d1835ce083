"""Falcon: the 7B (one key head, one norm), the 40B, 180B and 11B ("new decoder": grouped heads), and falcon-rw, which
has ALiBi and a key head for each query, and whose MLP waits for its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.positions import alibi_slopes
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, Layer, ParallelLayer, SequentialLayer
from legato.models.weights import Weights


@dataclass(frozen=True, slots=True)
class FalconShape:
    inner: int
    num_kv_heads: int
    eps: float
    bias: bool
    activation: str
    has_alibi: bool
    is_parallel: bool
    norms: tuple[str, ...]  # before attention, before the MLP; a single one serves both

    @classmethod
    def of(cls, config: ModelConfig) -> FalconShape:
        keys = config.keys
        # Before transformers knew it, the 40B called itself RefinedWeb and the 7B RefinedWebModel.
        is_new = keys.flag("new_decoder_architecture", default=config.model_type == "RefinedWeb")
        is_parallel = is_new or keys.flag("parallel_attn", default=True)
        norms: tuple[str, ...] = ("input_layernorm",)
        if not is_parallel:
            norms = ("input_layernorm", "post_attention_layernorm")
        elif is_new and keys.count("num_ln_in_parallel_attn", default=2) == 2:
            norms = ("ln_attn", "ln_mlp")
        if is_new:
            num_kv_heads = keys.count("num_kv_heads", "n_head_kv", default=config.num_heads)
        else:
            num_kv_heads = 1 if keys.flag("multi_query", default=True) else config.num_heads
        return cls(
            inner=keys.count("ffn_hidden_size", default=4 * config.hidden_size),
            num_kv_heads=num_kv_heads,
            eps=keys.number("layer_norm_epsilon", default=1e-5),
            bias=keys.flag("bias"),
            activation=keys.text("activation", default="gelu"),
            has_alibi=keys.flag("alibi"),
            is_parallel=is_parallel,
            norms=norms,
        )


class Falcon(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.shape = FalconShape.of(config)
        is_tied = config.keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, self.shape.num_kv_heads, config.head_dim)
        self.rotary: Rotary | None = None
        self.slopes: torch.Tensor | None = None
        if self.shape.has_alibi:
            self.slopes = alibi_slopes(heads, weights.device, scale=config.head_dim**-0.5)
        else:
            self.rotary = Rotary(config.rope(), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "word_embeddings.weight")
        self.embedding = weights.embedding(f"{root}word_embeddings", *size)
        self.layers = [self._layer(weights, f"{root}h.{i}", heads) for i in weights.shard.layers(config.num_layers)]
        self.norm = weights.layer_norm(f"{root}ln_f", config.hidden_size, self.shape.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads) -> Layer:
        shape, hidden, inner = self.shape, self.config.hidden_size, self.shape.inner
        bias, reduce = shape.bias, not shape.is_parallel
        norm, *other = (weights.layer_norm(f"{prefix}.{name}", hidden, shape.eps) for name in shape.norms)
        attention = Attention(
            # With one key head "grouped" is all queries, the key, the value: the 7B's layout as well.
            weights.qkv(f"{prefix}.self_attention.query_key_value", heads, hidden, bias=bias, layout="grouped"),
            SelfAttention(heads, self.rotary, slopes=self.slopes),
            weights.output(f"{prefix}.self_attention.dense", heads, hidden, bias=bias, reduce=reduce),
        )
        mlp = MLP(
            weights.column(f"{prefix}.mlp.dense_h_to_4h", inner, hidden, bias=bias),
            weights.row(f"{prefix}.mlp.dense_4h_to_h", hidden, inner, bias=bias, reduce=reduce),
            shape.activation,
        )
        if shape.is_parallel:
            return ParallelLayer(norm, attention, other[0] if other else None, mlp, weights.shard)
        return SequentialLayer(norm, attention, other[0], mlp)
