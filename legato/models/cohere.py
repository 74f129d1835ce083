"""Cohere: Command R, Command R+, and Command R7B and A (Cohere 2).

Attention and MLP read one layer norm, which has no bias. Neighbouring dimensions turn together. Command R+ norms
queries and keys, each head with weights of its own. Cohere 2 has a sliding window in most layers; the others see
everything, and their heads do not turn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.layers.attention import SelfAttention
from legato.layers.mlp import GatedMLP
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, ParallelLayer
from legato.models.rows import without_neighbours
from legato.models.weights import Weights


class PerHeadNorm:
    """A layer norm within each head, with weights [heads, head_dim]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight).to(x.dtype)


class Cohere(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.inner = keys.count("intermediate_size")
        self.eps = keys.number("layer_norm_eps", default=1e-5)
        self.activation = keys.text("hidden_act", default="silu")
        self.bias = keys.flag("attention_bias")
        self.has_head_norms = keys.flag("use_qk_norm")
        self.logit_scale = keys.number("logit_scale", default=0.0625)
        is_tied = keys.flag("tie_word_embeddings", default=True)
        windows = self.windows(config)
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary = Rotary(config.rope(), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        self.embedding = weights.embedding("model.embed_tokens", *size)
        self.layers = [
            self._layer(weights, f"model.layers.{i}", heads, windows[i] if windows else None)
            for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm("model.norm", config.hidden_size, self.eps, bias=False)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def windows(self, config: ModelConfig) -> tuple[int, ...]:
        """Of each layer, 0 for those that see everything and do not turn; () where all turn and see everything."""
        return ()

    def _layer(self, weights: Weights, prefix: str, heads: Heads, window: int | None) -> ParallelLayer:
        hidden, inner = self.config.hidden_size, self.inner
        return ParallelLayer(
            weights.layer_norm(f"{prefix}.input_layernorm", hidden, self.eps, bias=False),
            self._attention(weights, f"{prefix}.self_attn", heads, window),
            None,
            GatedMLP(
                weights.column([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], inner, hidden),
                weights.row(f"{prefix}.mlp.down_proj", hidden, inner, reduce=False),
                self.activation,
            ),
            weights.shard,
        )

    def _attention(self, weights: Weights, prefix: str, heads: Heads, window: int | None) -> Attention:
        hidden, bias = self.config.hidden_size, self.bias
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        norms: list[PerHeadNorm | None] = [None, None]
        if self.has_head_norms:
            order = without_neighbours(heads, heads.head_dim)[: heads.head_dim].to(weights.device)
            spans = ((heads.all_heads, heads.first, heads.last), (heads.all_kv_heads, heads.first_kv, heads.last_kv))
            for i, (part, (total, first, last)) in enumerate(zip("qk", spans, strict=True)):
                weight = weights.tensor(f"{prefix}.{part}_norm.weight", (total, heads.head_dim), {0: [(first, last)]})
                norms[i] = PerHeadNorm(weight[:, order], self.eps)
        return Attention(
            weights.qkv(names, heads, hidden, bias=bias, neighbours=heads.head_dim),
            SelfAttention(
                heads,
                None if window == 0 else self.rotary,
                q_norm=norms[0],
                k_norm=norms[1],
                window=window or 0,
            ),
            weights.output(f"{prefix}.o_proj", heads, hidden, bias=bias, reduce=False),
        )

    def limit(self, longest: int) -> None:
        self.rotary.limit(longest)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).mul_(self.logit_scale)


class Cohere2(Cohere):
    def windows(self, config: ModelConfig) -> tuple[int, ...]:
        keys = config.keys
        every = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=4)
        return config.windows(keys.count("sliding_window", default=4096), lambda layer: (layer + 1) % every != 0)
