"""Decoders that embed: Qwen3-Embedding, and others of Llama's family (Qwen 2, Mistral, Llama).

There is no KV cache, because every text is computed once and whole.
"""

from __future__ import annotations

import torch

from legato.layers.linear import Linear
from legato.layers.rotary import Rotary, rotate
from legato.modelfiles.embedding import Pooling
from legato.models.config import ModelConfig
from legato.models.encoders.batch import TextBatch, attend
from legato.models.encoders.pooling import pool
from legato.models.llama import Llama, LlamaParts, Mistral
from legato.models.qwen import Qwen2, Qwen3
from legato.models.weights import Weights

FAMILIES: dict[str, type[Llama]] = {"llama": Llama, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3}


class CausalTextLayer:
    def __init__(self, parts: LlamaParts, name: str, window: int) -> None:
        shape, heads, attention = parts.shape, parts.heads, f"{name}.self_attn"
        self._heads, self._window = heads, window
        names = [f"{attention}.{part}_proj" for part in "qkv"]
        self._norm = parts.norm(f"{name}.input_layernorm")
        self._qkv = parts.weights.qkv(names, heads, shape.hidden_size, bias=shape.qkv_bias)
        self._q_norm, self._k_norm = (
            parts.norm(f"{attention}.{part}_norm", heads.head_dim) if shape.has_head_norms else None for part in "qk"
        )
        self._output = parts.weights.output(f"{attention}.o_proj", heads, shape.hidden_size, bias=shape.output_bias)
        self._mlp_norm = parts.norm(f"{name}.post_attention_layernorm")
        self._mlp = parts.mlp(f"{name}.mlp")

    def __call__(self, x: torch.Tensor, batch: TextBatch, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        num, num_kv, dim = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        qkv = self._qkv(self._norm(x)).view(-1, num + 2 * num_kv, dim)
        q, k, v = qkv.split([num, num_kv, num_kv], dim=1)
        q = q if self._q_norm is None else self._q_norm(q.contiguous())
        k = k if self._k_norm is None else self._k_norm(k.contiguous())
        attended = attend(rotate(q, *cos_sin), rotate(k, *cos_sin), v, batch, causal=True, window=self._window)
        x = self._output(attended).add_(x)
        return self._mlp(self._mlp_norm(x)).add_(x)


class EmbeddingDecoder:
    prefix = "model."
    default_pooling: Pooling = "last"

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        family = FAMILIES[config.model_type]
        shape = family.read(family.__new__(family), config)
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        parts = LlamaParts(shape, heads, weights)
        self.hidden_size, self.vocab_size, self.max_tokens = config.hidden_size, config.vocab_size, config.max_positions
        prefix = weights.prefix(self.prefix, "embed_tokens.weight")
        self._words = weights.tensor(f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._rotary = Rotary(config.rope(), config.max_positions, weights.dtype, weights.device)
        windows = shape.windows or (0,) * config.num_layers
        self._layers = [CausalTextLayer(parts, f"{prefix}layers.{i}", window) for i, window in enumerate(windows)]
        self._norm = parts.norm(f"{prefix}norm")
        weights.skip_below("lm_head")

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """[T, hidden]"""
        x = self._words[batch.input_ids]
        cos_sin = self._rotary.look_up(batch.positions)
        for layer in self._layers:
            x = layer(x, batch, cos_sin)
        return self._norm(x)

    def classifier(self, weights: Weights, num_labels: int) -> LastTokenClassifier:
        return LastTokenClassifier(weights.linear("score", num_labels, self.hidden_size), num_labels)

    def skip_unused(self, weights: Weights) -> None:
        """Of a model that embeds."""
        weights.skip_below("score")


class LastTokenClassifier:
    def __init__(self, score: Linear, num_labels: int) -> None:
        self._score = score
        self.size = num_labels

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        return self._score(pool(hidden, batch, "last"))
