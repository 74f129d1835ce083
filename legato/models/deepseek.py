"""DeepSeek V2, V2-Lite, V3 and R1: keys and values come out of a small latent vector, and most layers have experts.

A head's queries and keys have a part without positions, of the latent vector, and a part that turns, which all key
heads share. `Rotary` turns the first dimensions of a head, so that part is put first, and its neighbours apart, when
the weights are read: scores stay the same.

The cache has whole keys and values of every head, values padded to the width of keys: in V2-Lite 2 x 27 layers x 16
heads x 192 dimensions, 331,776 bytes a token in bfloat16. The latent vectors alone would be 31,104, and would need an
attention of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.experts import ExpertMLP, ExpertRouter, Logits, RoutingOptions, SigmoidRouter
from legato.layers.mlp import Product
from legato.layers.norm import RMSNorm
from legato.layers.rotary import RopeConfig, Rotary, yarn_factor
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.keys import Keys
from legato.models.llama import LlamaParts, LlamaShape
from legato.models.mixtral import ExpertShape, read_experts
from legato.models.weights import Weights

LATENT_EPS = 1e-6  # of the norms on latent vectors, whatever config.json says of the others
# What a config.json that does not mention it means; V2-Lite says null.
Q_LATENT_SIZE = 1536


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of latent attention."""

    q_latent: int  # 0: queries come straight from the hidden state
    kv_latent: int
    still_dim: int  # of a head's queries and keys, the part without positions
    turned_dim: int
    v_dim: int
    has_bias: bool

    @classmethod
    def of(cls, keys: Keys) -> LatentShape:
        is_straight = keys.raw.get("q_lora_rank", Q_LATENT_SIZE) is None
        return cls(
            q_latent=0 if is_straight else keys.count("q_lora_rank", default=Q_LATENT_SIZE),
            kv_latent=keys.count("kv_lora_rank", default=512),
            still_dim=keys.count("qk_nope_head_dim", default=128),
            turned_dim=keys.count("qk_rope_head_dim", default=64),
            v_dim=keys.count("v_head_dim", default=128),
            has_bias=keys.flag("attention_bias"),
        )

    @property
    def head_dim(self) -> int:
        return self.still_dim + self.turned_dim

    def scale(self, rope: RopeConfig) -> float:
        """Of the scores. Where yarn stretches the context it is here, not in the rotation, that scores grow."""
        weight = rope.scaling.get("mscale_all_dim") if rope.kind != "default" else None
        return self.head_dim**-0.5 * (yarn_factor(rope.scaling["factor"], weight) ** 2 if weight else 1.0)


class LatentProjection:
    """Hidden state [T, hidden] -> queries, keys and values of this shard's heads, packed for `SelfAttention`."""

    def __init__(self, parts: LlamaParts, name: str, shape: LatentShape) -> None:
        weights, heads, hidden = parts.weights, parts.heads, parts.shape.hidden_size
        self.shape = shape
        self.num_heads = heads.num_heads
        turned, still = torch.arange(shape.turned_dim), torch.arange(shape.still_dim)
        turned = torch.cat((turned[::2], turned[1::2]))
        # A head of the checkpoint has what turns behind the rest.
        order = torch.cat((shape.still_dim + turned, still))
        self.q_latent: Product | None = None
        if shape.q_latent:
            self.q_latent = weights.linear(f"{name}.q_a_proj", shape.q_latent, hidden, bias=shape.has_bias)
            self.q_norm = RMSNorm(weights.tensor(f"{name}.q_a_layernorm.weight", (shape.q_latent,)), LATENT_EPS)
            self.q = weights.per_head(f"{name}.q_b_proj", heads, shape.head_dim, shape.q_latent, order)
        else:
            self.q = weights.per_head(f"{name}.q_proj", heads, shape.head_dim, hidden, order)
        order = torch.cat((torch.arange(shape.kv_latent), shape.kv_latent + turned))
        latent = f"{name}.kv_a_proj_with_mqa"
        self.kv_latent = weights.linear(latent, len(order), hidden, bias=shape.has_bias, order=order)
        self.kv_norm = RMSNorm(weights.tensor(f"{name}.kv_a_layernorm.weight", (shape.kv_latent,)), LATENT_EPS)
        self.kv = weights.per_head(f"{name}.kv_b_proj", heads, shape.still_dim + shape.v_dim, shape.kv_latent)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        q = self.q(x if self.q_latent is None else self.q_norm(self.q_latent(x)))
        latent, turned = self.kv_latent(x).split((shape.kv_latent, shape.turned_dim), dim=1)
        kv = self.kv(self.kv_norm(latent.contiguous())).unflatten(1, (self.num_heads, -1))
        still, v = kv.split((shape.still_dim, shape.v_dim), dim=2)
        k = torch.cat((turned[:, None].expand(-1, self.num_heads, -1), still), dim=2)
        return torch.cat((q, k.flatten(1), v.flatten(1)), dim=1)


@dataclass(frozen=True, slots=True)
class DeepseekShape:
    """The experts, and which layers have them."""

    experts: ExpertShape
    num_dense: int  # layers before the first with experts
    num_shared: int  # experts that all tokens read, as wide as the others
    factor: float  # of the experts' outputs
    num_groups: int
    num_chosen_groups: int
    is_corrected: bool = False  # V3's router

    @classmethod
    def of_v3(cls, keys: Keys) -> DeepseekShape:
        """What a config.json that does not mention it means is V3's own size."""
        experts = ExpertShape(
            num_experts=keys.count("n_routed_experts", "num_experts", default=256),
            intermediate_size=keys.count("moe_intermediate_size", default=2048),
            num_chosen=keys.count("num_experts_per_tok", default=8),
            normalise=keys.flag("norm_topk_prob", default=True),
        )
        num_groups = keys.count("n_group", default=8)
        if experts.num_experts % num_groups or experts.num_experts // num_groups < 2:
            raise UnsupportedModel(f"{experts.num_experts} experts do not make {num_groups} groups of the same size")
        return cls(
            experts,
            num_dense=int(keys.number("first_k_dense_replace", default=3)),
            num_shared=keys.count("n_shared_experts", default=1),
            factor=keys.number("routed_scaling_factor", default=2.5),
            num_groups=num_groups,
            num_chosen_groups=keys.count("topk_group", default=4),
            is_corrected=True,
        )

    @classmethod
    def of(cls, keys: Keys) -> DeepseekShape:
        for key, known in (("topk_method", ("greedy", "group_limited_greedy")), ("scoring_func", ("softmax",))):
            if (value := keys.text(key, default=known[0])) not in known:
                raise UnsupportedModel(f"config.json: {key} '{value}' is not supported; known: {', '.join(known)}")
        in_groups = keys.text("topk_method", default="greedy") == "group_limited_greedy"
        experts = ExpertShape(
            num_experts=keys.count("n_routed_experts", "num_experts", default=64),
            intermediate_size=keys.count("moe_intermediate_size", default=1407),
            num_chosen=keys.count("num_experts_per_tok"),
            normalise=False,
        )
        num_groups = keys.count("n_group") if in_groups else 1
        if experts.num_experts % num_groups:
            raise UnsupportedModel(f"{experts.num_experts} experts do not make {num_groups} groups of the same size")
        return cls(
            experts,
            num_dense=int(keys.number("first_k_dense_replace", default=0)),
            num_shared=keys.count("n_shared_experts", default=2),
            factor=keys.number("routed_scaling_factor", default=1.0),
            num_groups=num_groups,
            num_chosen_groups=keys.count("topk_group") if in_groups else 1,
        )

    def mlp(self, parts: LlamaParts, name: str) -> ExpertMLP:
        weights, shape, hidden = parts.weights, self.experts, parts.shape.hidden_size
        # In fp32, as in training.
        matrix = weights.tensor(f"{name}.gate.weight", (shape.num_experts, hidden), dtype=torch.float32)
        how = RoutingOptions(
            normalise=shape.normalise,
            factor=self.factor,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
        )
        if self.is_corrected:
            correction = weights.tensor(
                f"{name}.gate.e_score_correction_bias", (shape.num_experts,), dtype=torch.float32
            )
            router: ExpertRouter = SigmoidRouter(self._logits(matrix), shape.num_chosen, correction, **how)
        else:
            router = ExpertRouter(self._logits(matrix), shape.num_chosen, **how)
        shared = parts.mlp(f"{name}.shared_experts", self.num_shared * shape.intermediate_size, reduce=False)
        return ExpertMLP(read_experts(parts, name, shape, router=router), weights.shard, shared)

    @staticmethod
    def _logits(matrix: torch.Tensor) -> Logits:
        return lambda x: F.linear(x.float(), matrix)


class Deepseek(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        shape, latent, layers = LlamaShape.of(config), LatentShape.of(keys), self.read(keys)
        rope = config.rope(dim=latent.turned_dim)
        rotary = Rotary(rope, config.max_positions, weights.dtype, weights.device)
        heads = weights.heads(config.num_heads, config.num_heads, latent.head_dim, latent.v_dim)
        parts = LlamaParts(shape, heads, weights)
        super().__init__(config, weights, heads)

        def layer(i: int) -> SequentialLayer:
            name = f"model.layers.{i}"
            attention = Attention(
                LatentProjection(parts, f"{name}.self_attn", latent),
                SelfAttention(heads, rotary, scale=latent.scale(rope)),
                weights.output(f"{name}.self_attn.o_proj", heads, config.hidden_size, bias=latent.has_bias),
            )
            return SequentialLayer(
                parts.norm(f"{name}.input_layernorm"),
                attention,
                parts.norm(f"{name}.post_attention_layernorm"),
                parts.mlp(f"{name}.mlp") if i < layers.num_dense else layers.mlp(parts, f"{name}.mlp"),
            )

        size = (config.vocab_size, config.hidden_size)
        weights.skip_below(f"model.layers.{config.num_layers}")  # what predicts a second token, in V3's files
        self.embedding = weights.embedding("model.embed_tokens", *size)
        self.layers = [layer(i) for i in weights.shard.layers(config.num_layers)]
        self.norm = parts.norm("model.norm")
        self.head = weights.head("lm_head", self.embedding, *size, tied=config.is_tied)

    def read(self, keys: Keys) -> DeepseekShape:
        return DeepseekShape.of(keys)


class DeepseekV3(Deepseek):
    def read(self, keys: Keys) -> DeepseekShape:
        if not keys.flag("rope_interleave", default=True):
            raise UnsupportedModel("config.json: DeepSeek V3 without rope_interleave is not supported")
        return DeepseekShape.of_v3(keys)
