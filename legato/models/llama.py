"""Llama: Llama 1 to 3, Code Llama, SmolLM2 and everything that shares their layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.common.errors import UnsupportedModel
from legato.kernels.activation import silu_and_mul
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import KVCache, KVShape, LayerCache
from legato.layers.norm import RMSNorm
from legato.layers.rotary import Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.weights import Weights
from legato.quantization.dense import dense_weight


class LlamaAttention:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, rotary: Rotary) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = weights.linear(
            [(f"{prefix}.q_proj", q_size), (f"{prefix}.k_proj", kv_size), (f"{prefix}.v_proj", kv_size)],
            config.hidden_size,
            config.attention_bias,
        )
        self.attention = SelfAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, rotary, config.head_dim**-0.5
        )
        self.output = weights.linear([(f"{prefix}.o_proj", config.hidden_size)], q_size, config.attention_bias)

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        return self.output.apply(self.attention(self.qkv.apply(x), cache, step))


class LlamaMLP:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        if config.activation != "silu":
            raise UnsupportedModel(f"hidden_act '{config.activation}' is not supported for Llama; known: silu")
        inner = config.intermediate_size
        self.gate_up = weights.linear(
            [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)], config.hidden_size, config.mlp_bias
        )
        self.down = weights.linear([(f"{prefix}.down_proj", config.hidden_size)], inner, config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.apply(silu_and_mul(self.gate_up.apply(x)))


class LlamaLayer:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, rotary: Rotary) -> None:
        norm = (config.hidden_size,)
        self.input_norm = RMSNorm(weights.tensor(f"{prefix}.input_layernorm.weight", norm), config.norm_eps)
        self.attention = LlamaAttention(config, weights, f"{prefix}.self_attn", rotary)
        self.mlp_norm = RMSNorm(weights.tensor(f"{prefix}.post_attention_layernorm.weight", norm), config.norm_eps)
        self.mlp = LlamaMLP(config, weights, f"{prefix}.mlp")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is what the layer before added to the residual stream, not yet added."""
        normed, residual = self.input_norm.add(x, residual)
        normed, residual = self.mlp_norm.add(self.attention(normed, cache, step), residual)
        return self.mlp(normed), residual


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embedding = weights.tensor("model.embed_tokens.weight", size)
        rotary = Rotary(config.rope, config.max_positions, weights.dtype, weights.device)
        self.layers = [LlamaLayer(config, weights, f"model.layers.{i}", rotary) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights.tensor("model.norm.weight", (config.hidden_size,)), config.norm_eps)
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self.head = dense_weight(self.embedding if tied else weights.tensor("lm_head.weight", size))
        weights.skip("lm_head.weight")  # a checkpoint that says "tied" may still carry a copy
        self.kv_shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, weights.dtype)

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        """Hidden states [T, hidden_size] of all tokens of the step."""
        x = F.embedding(step.input_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, residual = layer(x, residual, layer_cache, step)
        return x if residual is None else x.add_(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden_size] -> [m, vocab_size]."""
        return self.head.apply(self.norm(hidden))
