"""gpt-oss: every head has a sink, a score that takes its share of the softmax and gives nothing; a window in every
other layer; experts with biases, whose gates are clipped. The published files have the experts in MXFP4."""

from __future__ import annotations

from dataclasses import replace

import torch

from legato.kernels.grouped_linear import group_rows
from legato.layers.attention import SelfAttention
from legato.layers.experts import ExpertRouter
from legato.layers.mlp import Product
from legato.layers.rotary import RopeConfig, Rotary
from legato.layers.shard import Shard
from legato.models.config import ModelConfig
from legato.models.decoder import Attention
from legato.models.llama import Llama, LlamaParts, LlamaShape
from legato.models.mixtral import ExpertShape
from legato.models.weights import Weights
from legato.quantization.experts import ExpertWeights, expert_weights
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.weight import Matrix, kinds_of

GATE_SLOPE = 1.702


class SinkParts(LlamaParts):
    def attention(self, name: str, rotary: Rotary, window: int = 0) -> Attention:
        shape, heads, weights = self.shape, self.heads, self.weights
        cut = {0: [(heads.first, heads.last)]}
        sinks = weights.tensor(f"{name}.sinks", (heads.all_heads,), cut, dtype=torch.float32)
        return Attention(
            weights.qkv([f"{name}.{part}_proj" for part in "qkv"], heads, shape.hidden_size, bias=shape.qkv_bias),
            SelfAttention(heads, rotary, window=window, sinks=sinks),
            weights.output(f"{name}.o_proj", heads, shape.hidden_size, bias=shape.output_bias),
        )


class ClippedExperts:
    """A layer's experts: gate and up are clipped, and both products have a bias for each expert."""

    def __init__(
        self,
        router: ExpertRouter,
        gate_up: tuple[ExpertWeights, torch.Tensor],
        down: tuple[ExpertWeights, torch.Tensor],
        limit: float,
        slope: float,
        shard: Shard,
    ) -> None:
        self.router = router
        self.gate_up, self.gate_up_bias = gate_up  # [2 inner, hidden] of each expert, gate and then up
        self.down, self.down_bias = down
        self.limit = limit
        self.slope = slope
        self.shard = shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        groups = group_rows(ids, self.gate_up.num_experts)
        gate, up = (self.gate_up.apply(x, groups) + self.gate_up_bias[ids.flatten()]).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * self.slope))
        outputs = self.down.apply(inner, groups, weights.flatten()).view(*ids.shape, -1)
        if self.shard.rank == 0:  # in the sum over the shards a bias counts once
            outputs = outputs + (self.down_bias[ids] * weights[:, :, None]).to(outputs.dtype)
        return self.shard.all_reduce(outputs.sum(1))


class GptOss(Llama):
    parts = SinkParts

    def read(self, config: ModelConfig) -> LlamaShape:
        keys, shape = config.keys, LlamaShape.of(config)
        self.experts = ExpertShape(
            num_experts=keys.count("num_local_experts", "num_experts", default=128),
            intermediate_size=shape.intermediate_size,
            num_chosen=keys.count("num_experts_per_tok", "experts_per_token", default=4),
            normalise=True,
        )
        self.gate_limit = keys.number("swiglu_limit", default=7.0)
        self.gate_slope = keys.number("swiglu_alpha", default=GATE_SLOPE)
        bias = keys.flag("attention_bias", default=True)
        window = keys.count("sliding_window", default=128)
        return replace(
            shape,
            norm_eps=keys.number("rms_norm_eps", default=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            windows=config.windows(window, lambda layer: layer % 2 == 0),
        )

    def rope(self, config: ModelConfig) -> RopeConfig:
        return config.rope(default_theta=150_000.0)

    def mlp(self, parts: LlamaParts, name: str) -> Product:
        weights, shape, hidden = parts.weights, self.experts, parts.shape.hidden_size
        logits = weights.linear(f"{name}.mlp.router", shape.num_experts, hidden, bias=True)
        return ClippedExperts(
            ExpertRouter(logits, shape.num_chosen, normalise=True),
            *_experts(weights, f"{name}.mlp.experts", shape, hidden),
            self.gate_limit,
            self.gate_slope,
            weights.shard,
        )


def _experts(
    weights: Weights, name: str, shape: ExpertShape, hidden: int
) -> tuple[tuple[ExpertWeights, torch.Tensor], tuple[ExpertWeights, torch.Tensor]]:
    """gate and up, and down, with our span of what is between them. In the file gate and up take turns row by row."""
    count, inner = shape.num_experts, shape.intermediate_size
    first, last = span = weights.shard.span(inner)
    pairs, places = (2 * first, 2 * last), torch.arange(2 * (last - first))
    order = torch.cat((places[::2], places[1::2])).to(weights.device)
    bias = weights.tensor(f"{name}.gate_up_proj_bias", (count, 2 * inner), {1: [pairs]})[:, order]
    down_bias = weights.tensor(f"{name}.down_proj_bias", (count, hidden))
    if f"{name}.gate_up_proj" in weights:
        gate_up = weights.tensor(f"{name}.gate_up_proj", (count, hidden, 2 * inner), {2: [pairs]}).transpose(1, 2)
        down = weights.tensor(f"{name}.down_proj", (count, inner, hidden), {1: [span]}).transpose(1, 2)
        made = weights.fused_experts(gate_up[:, order]), weights.fused_experts(down)
    else:
        ours = [(2 * inner * expert + pairs[0], 2 * inner * expert + pairs[1]) for expert in range(count)]
        matrix = weights.matrix(f"{name}.gate_up_proj", count * 2 * inner, hidden, rows=ours)
        rows = (torch.arange(count, device=weights.device)[:, None] * len(order) + order).flatten()
        down_matrix = weights.matrix(f"{name}.down_proj", count * hidden, inner, columns=span)
        made = _above_each_other(_taken(matrix, rows), count), _above_each_other(down_matrix, count)
        weights.kinds.update(kind for experts in made for kind in kinds_of(experts))
    return (made[0], bias), (made[1], down_bias)


def _taken(matrix: Matrix, rows: torch.Tensor) -> Matrix:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.take(rows)
    return matrix[rows]


def _above_each_other(matrix: Matrix, count: int) -> ExpertWeights:
    """[count rows, in] as the matrices of so many experts."""
    rows = (matrix.out_features if isinstance(matrix, QuantizedMatrix) else len(matrix)) // count
    if isinstance(matrix, QuantizedMatrix):
        return expert_weights([[matrix.rows(i * rows, (i + 1) * rows)] for i in range(count)])
    return expert_weights([[matrix[i * rows : (i + 1) * rows]] for i in range(count)])
