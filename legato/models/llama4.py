"""Llama 4: experts of which each token has one, and layers of two kinds.

Most layers turn queries and keys, norm them, and attend within chunks of 8,192 tokens; every fourth has no positions
but a temperature that grows with them. Sequences longer than a chunk are not served: attention here knows no chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.kernels.grouped_linear import group_rows
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import LayerCache
from legato.layers.mlp import Product, gate_by_name
from legato.layers.norm import RMSNorm
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Layer, SequentialLayer
from legato.models.keys import Keys
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.llama4_tower import Llama4Tower
from legato.models.vision import ImageSpan
from legato.models.weights import Weights
from legato.vision.llama4 import Llama4Rules
from legato.vision.rules import ImageRules, Size


class TemperedAttention(Attention):
    """Queries are scaled by their position."""

    def __init__(self, qkv: Product, attention: SelfAttention, output: Product, num_queries: int, keys: Keys) -> None:
        super().__init__(qkv, attention, output)
        self.num_queries = num_queries
        self.floor = keys.number("floor_scale", default=8192)
        self.factor = keys.number("attn_scale", default=0.1)

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv[:, : self.num_queries] *= step.once(("temperature", self.floor), lambda: self._scales(step)).to(qkv.dtype)
        return self.output(self.attention(qkv, cache, step))

    def _scales(self, step: Step) -> torch.Tensor:
        """[T, 1]"""
        steps = torch.floor((step.positions.float() + 1.0) / self.floor)
        return (torch.log1p(steps) * self.factor + 1.0)[:, None]


class OneExpertMLP:
    """The best expert of each token, whose input is scaled by its score, and one that all tokens have."""

    def __init__(self, parts: LlamaParts, name: str, num_experts: int, inner: int) -> None:
        weights, hidden = parts.weights, parts.shape.hidden_size
        first, last = weights.shard.span(inner)
        ours = [(first, last), (inner + first, inner + last)]
        self.shard = weights.shard
        self.logits = weights.linear(f"{name}.router", num_experts, hidden)
        gate_up = weights.tensor(f"{name}.experts.gate_up_proj", (num_experts, hidden, 2 * inner), {2: ours})
        down = weights.tensor(f"{name}.experts.down_proj", (num_experts, inner, hidden), {1: [(first, last)]})
        self.gate_up = weights.fused_experts(gate_up.transpose(1, 2))
        self.down = weights.fused_experts(down.transpose(1, 2))
        self.gate = gate_by_name(parts.shape.activation)
        self.shared = parts.mlp(f"{name}.shared_expert", inner, reduce=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.logits(x).topk(1)
        groups = group_rows(ids, self.gate_up.num_experts)
        inner = self.gate(self.gate_up.apply(x * scores.float().sigmoid().to(x.dtype), groups))
        out = self.down.apply(inner, groups, torch.ones(len(x), dtype=torch.float32, device=x.device))
        return self.shard.all_reduce(out.view(x.shape).add_(self.shared(x)))


class Llama4(Llama):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys = config.keys
        self.keys = keys
        every = keys.count("no_rope_layer_interval", default=4)
        turned = keys.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(config.num_layers)]
        step = keys.count("interleave_moe_layer_step", default=1)
        sparse = keys.get("moe_layers")
        sparse = range(step - 1, config.num_layers, step) if sparse is None else sparse
        if len(turned) != config.num_layers:
            raise ModelFileError(f"config.json: 'no_rope_layers' has {len(turned)} layers, not {config.num_layers}")
        if keys.count("num_experts_per_tok", default=1) != 1:
            raise UnsupportedModel("Llama 4 with several experts for a token is not supported")
        self.turned = [bool(layer) for layer in turned]
        self.sparse = frozenset(sparse)
        chunk = keys.get("attention_chunk_size")
        if chunk is not None:
            config = replace(config, max_positions=min(config.max_positions, keys.count("attention_chunk_size")))
        super().__init__(config, weights)

    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), norm_eps=config.keys.number("rms_norm_eps", default=1e-5))

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(default_theta=5e5)

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return SequentialLayer(
            parts.norm(f"{name}.input_layernorm"),
            self._attention(parts, f"{name}.self_attn", rotary, self.turned[int(name.rpartition(".")[2])]),
            parts.norm(f"{name}.post_attention_layernorm"),
            self.mlp(parts, name),
        )

    def _attention(self, parts: LlamaParts, name: str, rotary: Rotary, is_turned: bool) -> Attention:
        weights, heads, shape, keys = parts.weights, parts.heads, parts.shape, self.keys
        names = [f"{name}.{part}_proj" for part in "qkv"]
        neighbours = heads.head_dim if is_turned else 0
        qkv = weights.qkv(names, heads, shape.hidden_size, bias=shape.qkv_bias, neighbours=neighbours)
        output = weights.output(f"{name}.o_proj", heads, shape.hidden_size, bias=shape.output_bias)
        if not is_turned:
            attention = SelfAttention(heads)
            if not keys.flag("attn_temperature_tuning", default=True):
                return Attention(qkv, attention, output)
            return TemperedAttention(qkv, attention, output, heads.num_heads * heads.head_dim, keys)
        norm = None
        if keys.flag("use_qk_norm", default=True):
            # Behind the rotation, which does not change a length: it may as well come before.
            ones = torch.ones(heads.head_dim, dtype=weights.dtype, device=weights.device)
            norm = RMSNorm(ones, shape.norm_eps)
        return Attention(qkv, SelfAttention(heads, rotary, q_norm=norm, k_norm=norm), output)

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        if int(name.rpartition(".")[2]) not in self.sparse:
            return parts.mlp(f"{name}.feed_forward", self.keys.count("intermediate_size_mlp", default=16_384))
        count = self.keys.count("num_local_experts", default=16)
        return OneExpertMLP(parts, f"{name}.feed_forward", count, parts.shape.intermediate_size)


class Llama4WithImages(Llama4):
    prefix = "language_model.model"
    head_name = "language_model.lm_head"
    position_shifts: torch.Tensor | None = None
    image_rules: ImageRules | None = None  # written by the server

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.tower = Llama4Tower(config.keys.below("vision_config"), weights, "vision_model")
        self.projector = weights.linear(
            "multi_modal_projector.linear_1", config.hidden_size, self.tower.shape.num_features
        )

    def embed(self, step: Step) -> torch.Tensor:
        x = super().embed(step)
        return x if step.images is None else step.images.insert_into(x)

    def encode_image(self, pixels: torch.Tensor, shape: Size) -> torch.Tensor:
        """`shape` is in tiles; between their tokens are tokens of text, which are embedded here."""
        rules = self.image_rules
        assert isinstance(rules, Llama4Rules), "the server says what stands between the tiles"
        ids = torch.tensor(rules.image_ids(shape), device=pixels.device)
        x = self.embedding(ids)
        seen = self.projector(self.tower(pixels).flatten(0, 1)).to(x.dtype)
        return x.index_copy_(0, (ids == rules.patch_id).nonzero()[:, 0], seen)

    def image_positions(self, num_tokens: int, images: Sequence[ImageSpan]) -> None:
        """As text is."""
