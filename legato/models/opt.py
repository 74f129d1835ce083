"""OPT and Galactica: learned positions, three projections with biases. The 350M norms behind each block instead of
before it, and has an embedding narrower than its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import LayerCache
from legato.layers.mlp import MLP
from legato.layers.norm import LayerNorm
from legato.layers.positions import LearnedPositions
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.weights import Weights

FIRST_POSITION = 2  # the row of the table that position 0 has
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class OPTShape:
    hidden_size: int
    inner: int
    embedding_size: int
    bias: bool
    activation: str
    is_normed_before: bool
    has_final_norm: bool
    has_norm_weights: bool

    @classmethod
    def of(cls, config: ModelConfig) -> OPTShape:
        keys = config.keys
        before = keys.flag("do_layer_norm_before", default=True)
        return cls(
            hidden_size=config.hidden_size,
            inner=keys.count("ffn_dim"),
            embedding_size=keys.count("word_embed_proj_dim", default=config.hidden_size),
            bias=keys.flag("enable_bias", default=True),
            activation=keys.text("activation_function", default="relu"),
            is_normed_before=before,
            has_final_norm=before and not keys.flag("_remove_final_layer_norm"),
            has_norm_weights=keys.flag("layer_norm_elementwise_affine", default=True),
        )

    def norm(self, weights: Weights, name: str) -> LayerNorm:
        if not self.has_norm_weights:
            return LayerNorm(None, None, NORM_EPS, self.hidden_size)
        return weights.layer_norm(name, self.hidden_size, NORM_EPS)


class PostNormLayer(SequentialLayer):
    """Each norm comes behind the sum that it would come before: between layers there is one stream, not two."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert residual is None
        x, _ = self.norm.add(self.attention(x, cache, step), step.needed_after_attention(x))
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x, None


class OPT(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        shape = self.shape = OPTShape.of(config)
        is_tied = config.keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, config.num_heads, config.head_dim)
        super().__init__(config, weights, heads)

        hidden, width = shape.hidden_size, shape.embedding_size
        root = weights.prefix("model.", "decoder.embed_tokens.weight") + "decoder"
        self.embedding = weights.embedding(f"{root}.embed_tokens", config.vocab_size, width)
        rows = config.max_positions + FIRST_POSITION
        table = weights.tensor(f"{root}.embed_positions.weight", (rows, hidden))
        self.positions = LearnedPositions(table, offset=FIRST_POSITION)
        self.widen = weights.linear(f"{root}.project_in", hidden, width) if width != hidden else None
        self.layers = [
            self._layer(weights, f"{root}.layers.{i}", heads) for i in weights.shard.layers(config.num_layers)
        ]
        self.final_norm = shape.norm(weights, f"{root}.final_layer_norm") if shape.has_final_norm else None
        self.narrow = weights.linear(f"{root}.project_out", width, hidden) if width != hidden else None
        self.head = weights.head("lm_head", self.embedding, config.vocab_size, width, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads) -> SequentialLayer:
        shape, hidden, inner, bias = self.shape, self.shape.hidden_size, self.shape.inner, self.shape.bias
        names = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        make = SequentialLayer if shape.is_normed_before else PostNormLayer
        return make(
            shape.norm(weights, f"{prefix}.self_attn_layer_norm"),
            Attention(
                weights.qkv(names, heads, hidden, bias=bias),
                SelfAttention(heads),
                weights.output(f"{prefix}.self_attn.out_proj", heads, hidden, bias=bias),
            ),
            shape.norm(weights, f"{prefix}.final_layer_norm"),
            MLP(
                weights.column(f"{prefix}.fc1", inner, hidden, bias=bias),
                weights.row(f"{prefix}.fc2", hidden, inner, bias=bias),
                shape.activation,
            ),
        )

    def embed(self, step: Step) -> torch.Tensor:
        x = self.embedding(step.input_ids)
        if self.widen is not None:
            x = self.widen(x)
        return x + self.positions(step.positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return self.head(hidden if self.narrow is None else self.narrow(hidden))
