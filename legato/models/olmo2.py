"""OLMo 1 to 3. The first is Llama with norms that have no weights. OLMo 2 has norms behind attention and MLP, and over
all queries and all keys of a token; OLMo 3 a sliding window in three of four layers besides."""

from __future__ import annotations

from dataclasses import replace

import torch

from legato.layers.kv_cache import LayerCache
from legato.layers.norm import LayerNorm, RMSNorm
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Layer, Norm
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.weights import Weights


class ProjectionNorm:
    """Norms queries and keys within a packed projection, each over all heads: those of the other shards, too."""

    def __init__(self, parts: LlamaParts, name: str) -> None:
        heads, weights = parts.heads, parts.weights
        spans = [(heads.first, heads.last), (heads.first_kv, heads.last_kv)]
        totals = [heads.all_heads * heads.head_dim, heads.all_kv_heads * heads.head_dim]
        self.shard = weights.shard
        self.eps = parts.shape.norm_eps
        self.norms = []
        for part, (first, last), total in zip("qk", spans, totals, strict=True):
            cut = {0: [(first * heads.head_dim, last * heads.head_dim)]}
            self.norms.append(RMSNorm(weights.tensor(f"{name}.{part}_norm.weight", (total,), cut), self.eps))
        self.sizes = [norm.weight.shape[0] for norm in self.norms]
        # A key head that several shards keep is counted by the one with the first of its queries.
        counts_keys = heads.first == heads.first_kv * (heads.all_heads // heads.all_kv_heads)
        self.shares = torch.tensor([1 / totals[0], counts_keys / totals[1]], device=weights.device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """In place."""
        q_size, k_size = self.sizes
        parts = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        if self.shard.world_size == 1:
            for part, norm in zip(parts, self.norms, strict=True):
                part.copy_(norm(part))
            return qkv
        squares = torch.stack([part.float().square().sum(-1) for part in parts], dim=-1)
        scales = torch.rsqrt(self.shard.all_reduce(squares * self.shares) + self.eps)
        for i, (part, norm) in enumerate(zip(parts, self.norms, strict=True)):
            part.copy_(part.float() * scales[:, i, None] * norm.weight)
        return qkv


class BareNormParts(LlamaParts):
    def norm(self, name: str, size: int | None = None) -> Norm:
        return LayerNorm(None, None, 1e-5, size or self.shape.hidden_size)


class Olmo(Llama):
    parts = BareNormParts

    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), clip=config.keys.number("clip_qkv", default=0.0))


class Olmo2Layer:
    def __init__(self, parts: LlamaParts, name: str, rotary: Rotary, window: int = 0) -> None:
        self.attention = parts.attention(f"{name}.self_attn", rotary, window)
        self.projection_norm = ProjectionNorm(parts, f"{name}.self_attn")
        self.attended_norm = parts.norm(f"{name}.post_attention_layernorm")
        self.mlp = parts.mlp(f"{name}.mlp")
        self.output_norm = parts.norm(f"{name}.post_feedforward_layernorm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if residual is None else x.add_(residual)
        block = self.attention
        qkv = self.projection_norm(block.qkv(x))
        x = self.attended_norm(block.output(block.attention(qkv, cache, step))).add_(step.needed_after_attention(x))
        return self.output_norm(self.mlp(x)), x


class Olmo2(Llama):
    def read(self, config: ModelConfig) -> LlamaShape:
        return replace(LlamaShape.of(config), norm_eps=config.keys.number("rms_norm_eps", default=1e-5))

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return Olmo2Layer(parts, name, rotary, window)


class Olmo3(Olmo2):
    """What stretches the context is for the layers without a window."""

    def read(self, config: ModelConfig) -> LlamaShape:
        window = config.keys.count("sliding_window", default=4096)
        return replace(super().read(config), windows=config.windows(window, lambda layer: (layer + 1) % 4 != 0))

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        local = replace(config.rope(layer_type="sliding_attention", default_theta=5e5), scaling={})
        self.local_rotary = Rotary(local, config.max_positions, weights.dtype, weights.device)
        super().__init__(config, weights)

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(layer_type="full_attention", default_theta=5e5)

    def layer(self, parts: LlamaParts, name: str, rotary: Rotary, window: int) -> Layer:
        return super().layer(parts, name, self.local_rotary if window else rotary, window)
