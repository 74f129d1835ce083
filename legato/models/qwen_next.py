"""Qwen3-Next and Qwen3.5: a gated delta net in most layers and gated attention in the others, with experts or without.

Norms have their weight minus one in the checkpoint, but for those within a delta net. The layers for predicting several
tokens (`mtp`) and the vision towers of Qwen3.5 are not read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import HybridShape, LayerCache
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Layer, SequentialLayer, TokenMixer
from legato.models.delta_net import (
    ATTENTION,
    DELTA_NET,
    DeltaNet,
    DeltaShape,
    grouped_projections,
    layer_types,
    separate_projections,
)
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.qwen_moe import Qwen2Moe
from legato.models.rows import merged_ranges
from legato.models.targets import MatrixPart
from legato.models.weights import Weights


class GatedAttention(Attention):
    """Its projection has the gates of the result behind the queries."""

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        attention = self.attention
        num_queries, num_keys = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
        q, gates, k, v = self.qkv(x).split((num_queries, num_queries, num_keys, num_keys), dim=1)
        attended = attention(torch.cat((q, k, v), dim=1), cache, step)
        return self.output(attended.mul_(step.needed_after_attention(gates).sigmoid()))


def gated_attention(parts: LlamaParts, name: str, rotary: Rotary) -> GatedAttention:
    """In the checkpoint the gate of a head is behind its query."""
    shape, heads, weights = parts.shape, parts.heads, parts.weights
    size, queries = heads.head_dim, range(heads.first, heads.last)
    rows = [((2 * head + part) * size, (2 * head + part + 1) * size) for part in range(2) for head in queries]
    keys = [(heads.first_kv * size, heads.last_kv * size)]
    matrices = [
        MatrixPart(f"{name}.q_proj", 2 * heads.all_heads * size, merged_ranges(rows), is_attention=True),
        *(MatrixPart(f"{name}.{part}_proj", heads.all_kv_heads * size, keys, is_attention=True) for part in "kv"),
    ]
    q_norm, k_norm = (parts.norm(f"{name}.{part}_norm", size) for part in "qk")
    return GatedAttention(
        weights.rows(matrices, shape.hidden_size, bias=shape.qkv_bias),
        SelfAttention(heads, rotary, q_norm=q_norm, k_norm=k_norm),
        weights.output(f"{name}.o_proj", heads, shape.hidden_size, bias=shape.output_bias),
    )


class Qwen35(Llama):
    """Alone or as the language model of a checkpoint with a vision tower."""

    projections = staticmethod(separate_projections)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        if "text_config" in config.keys.raw:
            self.prefix = "model.language_model"
        super().__init__(config, weights)
        for unread in ("mtp", "model.visual"):
            weights.skip_below(unread)
        kv, numbers = self.kv_shape, weights.shard.layers(config.num_layers)
        self.kv_shape = HybridShape(
            kv.num_layers,
            kv.num_kv_heads,
            kv.head_dim,
            kv.dtype,
            self.delta.state_shapes(self.delta.heads(weights)),
            tuple(self.types[number] == DELTA_NET for number in numbers),
            scales=kv.scales,
        )

    def read(self, config: ModelConfig) -> LlamaShape:
        self.delta, self.types = DeltaShape.of(config), layer_types(config)
        bias = config.keys.flag("attention_bias")
        return replace(super().read(config), qkv_bias=bias, output_bias=bias, norm_offset=1.0)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(default_share=0.25)

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        mixer: TokenMixer
        if self.types[int(name.rpartition(".")[2])] == ATTENTION:
            mixer = gated_attention(parts, f"{name}.self_attn", rotary)
        else:
            sources = parts.shape.hidden_size, self.delta, parts.weights, f"{name}.linear_attn"
            mixer = DeltaNet(*sources, self.projections(*sources))
        norms = [parts.norm(f"{name}.{part}_layernorm") for part in ("input", "post_attention")]
        layer = SequentialLayer(norms[0], mixer, norms[1], self.mlp(parts, name))
        layer.leave_parts()
        return layer


class Qwen35Moe(Qwen35, Qwen2Moe):
    """With experts, a shared one among them."""

    num_experts = 256
    num_chosen = 8
    expert_size = 512

    def read(self, config: ModelConfig) -> LlamaShape:
        defaults = dict(norm_topk_prob=True, shared_expert_intermediate_size=512)
        inner = config.keys.count("moe_intermediate_size", default=self.expert_size)
        keys = config.keys.over(**defaults, intermediate_size=inner)  # of layers without experts, which may not exist
        return super().read(replace(config, keys=keys))


class Qwen3Next(Qwen35Moe):
    projections = staticmethod(grouped_projections)
    num_experts = 512
    num_chosen = 10
