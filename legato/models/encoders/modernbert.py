"""ModernBERT: rotary positions, gated MLPs, a norm before every product, and two layers of three that see near tokens
only."""

from __future__ import annotations

import torch

from legato.layers.linear import Linear
from legato.layers.mlp import activation_by_name, gate_by_name
from legato.layers.norm import LayerNorm
from legato.layers.rotary import Rotary, rotate
from legato.modelfiles.embedding import Pooling
from legato.models.config import ModelConfig
from legato.models.encoders.batch import TextBatch, attend
from legato.models.encoders.pooling import pool
from legato.models.weights import Weights

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
GLOBAL, LOCAL = "full_attention", "sliding_attention"


class ModernBertLayer:
    def __init__(self, config: ModelConfig, weights: Weights, name: str, rotary: Rotary, window: int) -> None:
        keys, hidden, inner = config.keys, config.hidden_size, config.keys.count("intermediate_size")
        self._heads, self._dim = config.num_heads, config.head_dim
        self._rotary, self._window = rotary, window
        eps, norm_bias = keys.number("norm_eps", default=1e-5), keys.flag("norm_bias")
        bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
        # The first layer reads what the embedding's norm made.
        has_norm = f"{name}.attn_norm.weight" in weights and not name.endswith("layers.0")
        self._norm = weights.layer_norm(f"{name}.attn_norm", hidden, eps, bias=norm_bias) if has_norm else None
        self._qkv = weights.linear(f"{name}.attn.Wqkv", 3 * hidden, hidden, bias=bias)
        self._output = weights.linear(f"{name}.attn.Wo", hidden, hidden, bias=bias)
        self._mlp_norm = weights.layer_norm(f"{name}.mlp_norm", hidden, eps, bias=norm_bias)
        self._gate_up = weights.linear(f"{name}.mlp.Wi", 2 * inner, hidden, bias=mlp_bias)
        self._gate = gate_by_name(keys.text("hidden_activation", default="gelu"))
        self._down = weights.linear(f"{name}.mlp.Wo", hidden, inner, bias=mlp_bias)

    def __call__(self, x: torch.Tensor, batch: TextBatch, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        normed = x if self._norm is None else self._norm(x)
        q, k, v = self._qkv(normed).view(-1, 3, self._heads, self._dim).unbind(1)
        attended = attend(rotate(q, *cos_sin), rotate(k, *cos_sin), v, batch, window=self._window)
        x = self._output(attended).add_(x)
        return self._down(self._gate(self._gate_up(self._mlp_norm(x)))).add_(x)

    @property
    def rotary(self) -> Rotary:
        return self._rotary


class ModernBert:
    prefix = "model."
    default_pooling: Pooling = "mean"

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        self._keys, self._eps = keys, keys.number("norm_eps", default=1e-5)
        self._has_norm_bias = keys.flag("norm_bias")
        self.hidden_size, self.vocab_size, self.max_tokens = hidden, config.vocab_size, config.max_positions
        prefix = weights.prefix(self.prefix, "embeddings.tok_embeddings.weight")
        name = f"{prefix}embeddings"
        self._words = weights.tensor(f"{name}.tok_embeddings.weight", (config.vocab_size, hidden))
        self._norm = weights.layer_norm(f"{name}.norm", hidden, self._eps, bias=self._has_norm_bias)
        every = keys.count("global_attn_every_n_layers", default=3)
        # Half of the tokens that `local_attention` counts are before a token, half behind it.
        reach = keys.count("local_attention", default=128) // 2 + 1
        windows = config.windows(reach, lambda layer: layer % every != 0)
        rotaries = {window: self._rotary(config, weights, window) for window in set(windows)}
        self._layers = [
            ModernBertLayer(config, weights, f"{prefix}layers.{i}", rotaries[window], window)
            for i, window in enumerate(windows)
        ]
        self._last_norm = weights.layer_norm(f"{prefix}final_norm", hidden, self._eps, bias=self._has_norm_bias)
        weights.skip_below("decoder")

    @staticmethod
    def _rotary(config: ModelConfig, weights: Weights, window: int) -> Rotary:
        kind, old, default = (
            (LOCAL, "local_rope_theta", LOCAL_THETA) if window else (GLOBAL, "global_rope_theta", GLOBAL_THETA)
        )
        theta = config.keys.number(old, default=default)
        rope = config.rope(layer_type=kind, default_theta=theta)
        return Rotary(rope, config.max_positions, weights.dtype, weights.device)

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """[T, hidden]"""
        x = self._norm(self._words[batch.input_ids])
        tables = {layer.rotary: layer.rotary.look_up(batch.positions) for layer in self._layers}
        for layer in self._layers:
            x = layer(x, batch, tables[layer.rotary])
        return self._last_norm(x)

    def classifier(self, weights: Weights, num_labels: int) -> ModernBertClassifier:
        keys, hidden = self._keys, self.hidden_size
        pooling: Pooling = "mean" if keys.text("classifier_pooling", default="cls") == "mean" else "cls"
        return ModernBertClassifier(
            pooling,
            weights.linear("head.dense", hidden, hidden, bias=keys.flag("classifier_bias")),
            keys.text("classifier_activation", default="gelu"),
            weights.layer_norm("head.norm", hidden, self._eps, bias=self._has_norm_bias),
            weights.linear("classifier", num_labels, hidden, bias=True),
            num_labels,
        )

    def skip_unused(self, weights: Weights) -> None:
        """Of a model that embeds."""
        weights.skip_below("head")
        weights.skip_below("classifier")


class ModernBertClassifier:
    def __init__(
        self, pooling: Pooling, dense: Linear, activation: str, norm: LayerNorm, output: Linear, num_labels: int
    ) -> None:
        self._pooling: Pooling = pooling
        self._dense, self._activate, self._norm, self._output = dense, activation_by_name(activation), norm, output
        self.size = num_labels

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        pooled = pool(hidden, batch, self._pooling).to(hidden.dtype)
        return self._output(self._norm(self._activate(self._dense(pooled))))
