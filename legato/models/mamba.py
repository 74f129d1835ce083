"""Mamba: a state for each channel instead of attention, which a token reads and changes.

States are kept in blocks of the cache (`layers/kv_cache.py`), channels are divided between the shards.
"""

from __future__ import annotations

import torch

from legato.common.errors import UnsupportedModel
from legato.kernels.recurrent.convolution import short_convolution
from legato.kernels.recurrent.selective_scan import selective_scan
from legato.kernels.recurrent.states import StateBlocks, StateSequences
from legato.layers.kv_cache import LayerCache, StateCache, StateShape
from legato.layers.norm import RMSNorm
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.decoder import Decoder, Norm
from legato.models.weights import Weights


class MambaMixer:
    """This shard's channels of one layer."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        keys, hidden = config.keys, config.hidden_size
        inner, self.state_size, width = inner_size(config), state_size(config), conv_width(config)
        rank = keys.get("time_step_rank")
        self.rank = -(-hidden // 16) if rank in (None, "auto") else keys.count("time_step_rank")
        span = weights.shard.span(inner)
        cut = {0: [span]}
        bias = keys.flag("use_bias")
        self.num_channels = span[1] - span[0]
        self.input = weights.column(f"{name}.in_proj", inner, hidden, bias=bias, fused=2)
        self.conv = weights.tensor(f"{name}.conv1d.weight", (inner, 1, width), cut)[:, 0].contiguous()
        has_conv_bias = keys.flag("use_conv_bias", default=True)
        self.conv_bias = weights.tensor(f"{name}.conv1d.bias", (inner,), cut) if has_conv_bias else None
        # The step, and what goes into and comes out of the state: sums over all channels.
        self.select = weights.row(f"{name}.x_proj", self.rank + 2 * self.state_size, inner)
        self.step_size = weights.column(f"{name}.dt_proj", inner, self.rank, bias=True)
        exponents = weights.tensor(f"{name}.A_log", (inner, self.state_size), cut, torch.float32)
        self.decay = -torch.exp(exponents)
        self.skip = weights.tensor(f"{name}.D", (inner,), cut, torch.float32)
        self.output = weights.row(f"{name}.out_proj", hidden, inner, bias=bias)

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        blocks = StateBlocks(cache.keys, cache.values, step_sequences(step, cache))
        inputs, gate = self.input(x).split(self.num_channels, dim=1)
        mixed = short_convolution(inputs, self.conv, self.conv_bias, self.state_size, blocks)
        sizes, into, out = self.select(mixed).split((self.rank, self.state_size, self.state_size), dim=1)
        steps = self.step_size(sizes.contiguous())
        scanned = selective_scan(mixed, steps, self.decay, into, out, self.skip, gate, blocks)
        return self.output(step.needed_after_attention(scanned))


class MambaLayer:
    def __init__(self, norm: Norm, mixer: MambaMixer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.norm.add(x, residual)
        return self.mixer(normed, cache, step), step.needed_after_attention(residual)


class Mamba(Decoder):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        keys, hidden = config.keys, config.hidden_size
        if (activation := keys.text("hidden_act", default="silu")) != "silu":
            raise UnsupportedModel(f"config.json: hidden_act '{activation}' is not supported; known: silu")
        self.config, eps = config, keys.number("layer_norm_epsilon", default=1e-5)
        name = "backbone.embeddings" if "backbone.embeddings.weight" in weights else "backbone.embedding"
        self.embedding = weights.embedding(name, config.vocab_size, hidden)
        layers = [
            MambaLayer(
                RMSNorm(weights.tensor(f"backbone.layers.{number}.norm.weight", (hidden,)), eps),
                MambaMixer(config, weights, f"backbone.layers.{number}.mixer"),
            )
            for number in weights.shard.layers(config.num_layers)
        ]
        self.norm = RMSNorm(weights.tensor("backbone.norm_f.weight", (hidden,)), eps)
        is_tied = keys.flag("tie_word_embeddings", default=True)
        self.head = weights.head("lm_head", self.embedding, config.vocab_size, hidden, tied=is_tied)
        self.layers = layers
        width = state_size(config) + conv_width(config) - 1
        # Shards agree on the size of a block: as large as that of the one with most channels.
        most = -(-inner_size(config) // weights.shard.world_size)
        self.kv_shape = StateShape.of(len(layers), most, width)


def inner_size(config: ModelConfig) -> int:
    """Channels of all shards."""
    keys = config.keys
    return keys.count("intermediate_size", default=config.hidden_size * keys.count("expand", default=2))


def state_size(config: ModelConfig) -> int:
    """Numbers of a channel, beside the last inputs of its convolution."""
    return config.keys.count("state_size", default=16)


def conv_width(config: ModelConfig) -> int:
    return config.keys.count("conv_kernel", default=4)


def step_sequences(step: Step, cache: LayerCache) -> StateSequences:
    """Which states the sequences of a step read and write, in every layer that keeps some."""
    assert isinstance(cache, StateCache), "the layer keeps states"
    return step.once("state_sequences", lambda: _sequences(step, cache.block_size))


def _sequences(step: Step, block_size: int) -> StateSequences:
    firsts = torch.arange(step.num_decodes, dtype=torch.int32, device=step.rows.device)
    counts = torch.ones_like(firsts)
    if step.chunks is not None:
        ends = step.chunks.cu_seqlens_q + step.chunks.first_token
        firsts, counts = torch.cat((firsts, ends[:-1])), torch.cat((counts, ends.diff()))
    return StateSequences(step.block_tables, step.rows, step.context_lens, firsts, counts, block_size)
