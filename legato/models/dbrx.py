"""DBRX: experts in every layer, layer norms without biases, and clipped projections in one matrix.

config.json has what belongs to attention and to the experts in objects of their own. The checkpoint has all experts of
a layer in three matrices, one below the other, of which the last one is transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from legato.common.errors import UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.experts import ExpertMLP, ExpertRouter, Experts
from legato.layers.rotary import Rotary
from legato.layers.shard import Heads
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Clipped, Decoder, SequentialLayer
from legato.models.keys import Keys
from legato.models.mixtral import ExpertShape
from legato.models.weights import Weights

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class DbrxShape:
    num_kv_heads: int
    clip: float  # 0: none
    theta: float
    experts: ExpertShape
    activation: str

    @classmethod
    def of(cls, keys: Keys) -> DbrxShape:
        attention, experts = keys.below("attn_config"), keys.below("ffn_config")
        power = experts.raw.get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1):
            raise UnsupportedModel(f"{experts.path}: 'moe_normalize_expert_weights' is {power}, not 1 or null")
        return cls(
            num_kv_heads=attention.count("kv_n_heads", default=1),
            clip=attention.number("clip_qkv", default=0.0),
            theta=attention.number("rope_theta", default=10_000.0),
            experts=ExpertShape(
                num_experts=experts.count("moe_num_experts", default=4),
                intermediate_size=experts.count("ffn_hidden_size", default=3584),
                num_chosen=experts.count("moe_top_k", default=1),
                normalise=power is not None,
            ),
            activation=experts.below("ffn_act_fn").text("name", default="silu"),
        )


class Dbrx(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.shape = DbrxShape.of(config.keys)
        heads = weights.heads(config.num_heads, self.shape.num_kv_heads, config.head_dim)
        rope = config.rope(default_theta=self.shape.theta)
        rotary = Rotary(rope, config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights, heads)

        size = (config.vocab_size, config.hidden_size)
        self.embedding = weights.embedding("transformer.wte", *size)
        self.layers = [
            self._layer(weights, f"transformer.blocks.{i}", heads, rotary)
            for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm("transformer.norm_f", config.hidden_size, NORM_EPS, bias=False)
        self.head = weights.head("lm_head", self.embedding, *size, tied=config.is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, rotary: Rotary) -> SequentialLayer:
        hidden, block, clip = self.config.hidden_size, f"{prefix}.norm_attn_norm", self.shape.clip
        qkv = weights.qkv(f"{block}.attn.Wqkv", heads, hidden)
        return SequentialLayer(
            weights.layer_norm(f"{block}.norm_1", hidden, NORM_EPS, bias=False),
            Attention(
                Clipped(qkv, clip) if clip else qkv,
                SelfAttention(heads, rotary),
                weights.output(f"{block}.attn.out_proj", heads, hidden),
            ),
            weights.layer_norm(f"{block}.norm_2", hidden, NORM_EPS, bias=False),
            self._experts(weights, f"{prefix}.ffn"),
        )

    def _experts(self, weights: Weights, name: str) -> ExpertMLP:
        shape, hidden = self.shape.experts, self.config.hidden_size
        router = ExpertRouter(
            weights.linear(f"{name}.router.layer", shape.num_experts, hidden),
            shape.num_chosen,
            normalise=shape.normalise,
        )
        names = [f"{name}.experts.mlp.{part}" for part in ("w1", "v1", "w2")]
        matrices = weights.stacked_experts(names, shape.num_experts, shape.intermediate_size, hidden)
        return ExpertMLP(Experts(router, *matrices, self.shape.activation), weights.shard)
