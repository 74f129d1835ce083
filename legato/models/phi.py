"""Phi 1, 1.5 and 2: attention and MLP read one norm, part of each head turns, and everything has a bias. PhiMoE
(Phi-3.5-MoE): Llama with layer norms and experts, two of which its own router chooses."""

from __future__ import annotations

from dataclasses import replace

from legato.common.errors import UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.experts import ExpertMLP, SparseMixer
from legato.layers.mlp import MLP, Product
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, ParallelLayer
from legato.models.llama import LayerNormParts, Llama, LlamaParts, LlamaShape
from legato.models.mixtral import ExpertShape, read_experts
from legato.models.weights import Weights


class Phi(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.inner = keys.count("intermediate_size", default=4 * config.hidden_size)
        self.eps = keys.number("layer_norm_eps", default=1e-5)
        self.activation = keys.text("hidden_act", default="gelu_new")
        self.has_head_norms = keys.flag("qk_layernorm")
        heads = weights.heads(config.num_heads, config.num_kv_heads, config.head_dim)
        rotary = Rotary(config.rope(default_share=0.5), config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        self.embedding = weights.embedding("model.embed_tokens", *size)
        self.layers = [
            self._layer(weights, f"model.layers.{i}", heads, rotary) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm("model.final_layernorm", config.hidden_size, self.eps)
        self.head = weights.head("lm_head", self.embedding, *size, tied=config.is_tied, bias=True)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, rotary: Rotary) -> ParallelLayer:
        hidden, inner, attention = self.config.hidden_size, self.inner, f"{prefix}.self_attn"
        q_norm, k_norm = (
            weights.layer_norm(f"{attention}.{part}_layernorm", heads.head_dim, self.eps)
            if self.has_head_norms
            else None
            for part in "qk"
        )
        return ParallelLayer(
            weights.layer_norm(f"{prefix}.input_layernorm", hidden, self.eps),
            Attention(
                weights.qkv([f"{attention}.{part}_proj" for part in "qkv"], heads, hidden, bias=True),
                SelfAttention(heads, rotary, q_norm=q_norm, k_norm=k_norm),
                weights.output(f"{attention}.dense", heads, hidden, bias=True, reduce=False),
            ),
            None,
            MLP(
                weights.column(f"{prefix}.mlp.fc1", inner, hidden, bias=True),
                weights.row(f"{prefix}.mlp.fc2", hidden, inner, bias=True, reduce=False),
                self.activation,
            ),
            weights.shard,
        )


class PhiMoe(Llama):
    parts = LayerNormParts

    def read(self, config: ModelConfig) -> LlamaShape:
        keys, shape = config.keys, LlamaShape.of(config)
        self.experts = ExpertShape(
            num_experts=keys.count("num_local_experts", default=16),
            intermediate_size=shape.intermediate_size,
            num_chosen=keys.count("num_experts_per_tok", default=2),
            normalise=False,
        )
        if self.experts.num_chosen != 2:
            raise UnsupportedModel(f"PhiMoE routes to two experts, and config.json says {self.experts.num_chosen}")
        self.jitter = keys.number("router_jitter_noise", default=0.01)
        window = 0 if keys.get("sliding_window") is None else keys.count("sliding_window")
        return replace(
            shape,
            norm_eps=keys.number("rms_norm_eps", default=1e-5),
            head_bias=keys.flag("lm_head_bias"),
            windows=(window,) * config.num_layers if window < config.max_positions else (),
        )

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(default_theta=1e6)

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        weights, shape = parts.weights, self.experts
        block = f"{name}.block_sparse_moe"
        gate = f"{block}.gate"
        if not weights.has_matrix(gate):  # as transformers has it in memory
            block, gate = f"{name}.mlp", f"{name}.mlp.router"
        router = SparseMixer(weights.linear(gate, shape.num_experts, parts.shape.hidden_size), 2 * self.jitter)
        return ExpertMLP(read_experts(parts, block, shape, ("w1", "w3", "w2"), router), weights.shard)
