"""MPT: ALiBi or learned positions, and the options of the code that it was trained with: clipped projections, norms on
queries and keys, shared key heads, scaled logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.layers.attention import SelfAttention
from legato.layers.mlp import MLP
from legato.layers.positions import LearnedPositions, alibi_slopes
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Attention, Clipped, Decoder, SequentialLayer
from legato.models.keys import Keys
from legato.models.weights import Weights


@dataclass(frozen=True, slots=True)
class MPTShape:
    hidden_size: int
    head_dim: int
    inner: int
    num_kv_heads: int
    eps: float
    bias: bool
    has_alibi: bool
    alibi_bias_max: float
    has_positions: bool
    scale: float
    clip: float  # 0: none
    has_head_norms: bool
    logit_scale: float

    @classmethod
    def of(cls, config: ModelConfig) -> MPTShape:
        keys, attention = config.keys, config.keys.below("attn_config")
        _refuse(keys, attention)
        has_alibi = attention.flag("alibi", default=True)
        return cls(
            hidden_size=config.hidden_size,
            head_dim=config.head_dim,
            inner=int(keys.number("expansion_ratio", default=4) * config.hidden_size),
            num_kv_heads=_num_kv_heads(attention, config.num_heads),
            eps=keys.number("layer_norm_epsilon", default=1e-5),
            bias=not keys.flag("no_bias", default=True),
            has_alibi=has_alibi,
            alibi_bias_max=attention.number("alibi_bias_max", default=8.0),
            has_positions=not has_alibi and keys.flag("learned_pos_emb", default=True),
            scale=attention.number("softmax_scale", default=config.head_dim**-0.5),
            clip=attention.number("clip_qkv", default=0.0),
            has_head_norms=attention.flag("qk_ln"),
            logit_scale=_logit_scale(keys, config.hidden_size),
        )


def _refuse(keys: Keys, attention: Keys) -> None:
    """What the training code could do and no published model does: better not served than served wrongly."""
    for name in ("rope", "prefix_lm", "qk_gn"):
        if attention.flag(name):
            raise UnsupportedModel(f"{attention.path}: '{name}' is not supported for MPT")
    if attention.number("sliding_window_size", default=-1) > 0:
        raise UnsupportedModel(f"{attention.path}: 'sliding_window_size' is not supported for MPT")
    if not (norm := keys.text("norm_type", default="layernorm")).endswith("layernorm"):
        raise UnsupportedModel(f"{keys.path}: the norm_type '{norm}' is not supported for MPT")


def _num_kv_heads(attention: Keys, num_heads: int) -> int:
    kind = attention.text("attn_type", default="multihead_attention")
    if kind == "grouped_query_attention":
        return attention.count("kv_n_heads")
    if kind not in ("multihead_attention", "multiquery_attention"):
        raise UnsupportedModel(f"{attention.path}: the attn_type '{kind}' is not supported for MPT")
    return 1 if kind == "multiquery_attention" else num_heads


def _logit_scale(keys: Keys, hidden_size: int) -> float:
    match keys.get("logit_scale"):
        case None:
            return 1.0
        case "inv_sqrt_d_model":
            return hidden_size**-0.5
        case str() as other:
            raise ModelFileError(f"{keys.path}: 'logit_scale' is {other!r}, not a number or 'inv_sqrt_d_model'")
    return keys.number("logit_scale")


class WideNorm:
    """A layer norm over all heads of a projection at once, [T, heads, head_dim], of which this shard has some.

    Mean and variance are sums over the shards. Where several shards keep the same key head, one of them `counts`.
    """

    def __init__(
        self, weights: Weights, name: str, heads: range, num_heads: int, shape: MPTShape, counts: bool
    ) -> None:
        head_dim = shape.head_dim
        self.size = num_heads * head_dim
        self.shard = weights.shard
        self.eps = shape.eps
        self.counts = counts
        cut = {0: [(heads.start * head_dim, heads.stop * head_dim)]}
        self.weight = weights.tensor(f"{name}.weight", (self.size,), cut)
        self.bias = weights.tensor(f"{name}.bias", (self.size,), cut) if shape.bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        if flat.shape[1] == self.size:
            return F.layer_norm(flat, (self.size,), self.weight, self.bias, self.eps).view(x.shape)
        flat = flat.float()
        centred = flat - self._sum(flat) / self.size
        normed = centred * torch.rsqrt(self._sum(centred.square()) / self.size + self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype).view(x.shape)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        ours = x.sum(-1, keepdim=True)
        return self.shard.all_reduce(ours if self.counts else torch.zeros_like(ours))


class MPT(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        shape = self.shape = MPTShape.of(config)
        is_tied = config.keys.flag("tie_word_embeddings", default=True)
        heads = weights.heads(config.num_heads, shape.num_kv_heads, config.head_dim)
        super().__init__(config, weights, heads)

        hidden, size = config.hidden_size, (config.vocab_size, config.hidden_size)
        root = weights.prefix("transformer.", "wte.weight")
        self.embedding = weights.embedding(f"{root}wte", *size)
        self.positions: LearnedPositions | None = None
        if shape.has_positions:
            self.positions = LearnedPositions(weights.tensor(f"{root}wpe.weight", (config.max_positions, hidden)))
        slopes = alibi_slopes(heads, weights.device, shape.alibi_bias_max) if shape.has_alibi else None
        self.layers = [
            self._layer(weights, f"{root}blocks.{i}", heads, slopes) for i in weights.shard.layers(config.num_layers)
        ]
        self.norm = weights.layer_norm(f"{root}norm_f", hidden, shape.eps, bias=shape.bias)
        self.head = weights.head("lm_head", self.embedding, *size, tied=is_tied)

    def _layer(self, weights: Weights, prefix: str, heads: Heads, slopes: torch.Tensor | None) -> SequentialLayer:
        shape, hidden, inner, bias = self.shape, self.shape.hidden_size, self.shape.inner, self.shape.bias
        return SequentialLayer(
            weights.layer_norm(f"{prefix}.norm_1", hidden, shape.eps, bias=bias),
            self._attention(weights, f"{prefix}.attn", heads, slopes),
            weights.layer_norm(f"{prefix}.norm_2", hidden, shape.eps, bias=bias),
            MLP(
                weights.column(f"{prefix}.ffn.up_proj", inner, hidden, bias=bias),
                weights.row(f"{prefix}.ffn.down_proj", hidden, inner, bias=bias),
                "gelu",
            ),
        )

    def _attention(self, weights: Weights, prefix: str, heads: Heads, slopes: torch.Tensor | None) -> Attention:
        shape, hidden = self.shape, self.shape.hidden_size
        qkv = weights.qkv(f"{prefix}.Wqkv", heads, hidden, bias=shape.bias)
        q_norm = k_norm = None
        if shape.has_head_norms:
            queries, keys = range(heads.first, heads.last), range(heads.first_kv, heads.last_kv)
            is_first = heads.first * heads.all_kv_heads == heads.first_kv * heads.all_heads
            q_norm = WideNorm(weights, f"{prefix}.q_ln", queries, heads.all_heads, shape, True)
            k_norm = WideNorm(weights, f"{prefix}.k_ln", keys, heads.all_kv_heads, shape, is_first)
        return Attention(
            Clipped(qkv, shape.clip) if shape.clip else qkv,
            SelfAttention(heads, scale=shape.scale, q_norm=q_norm, k_norm=k_norm, slopes=slopes),
            weights.output(f"{prefix}.out_proj", heads, hidden, bias=shape.bias),
        )

    def embed(self, step: Step) -> torch.Tensor:
        x = self.embedding(step.input_ids)
        return x if self.positions is None else x + self.positions(step.positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return logits if self.shape.logit_scale == 1.0 else logits * self.shape.logit_scale
