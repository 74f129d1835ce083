"""Gated delta net: attention without keys and values, with a state for each head that a token reads and corrects.

States are kept in blocks of the cache (`layers/kv_cache.py`), heads are divided between the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.kernels.recurrent.convolution import short_convolution
from legato.kernels.recurrent.delta_rule import delta_rule
from legato.kernels.recurrent.states import StateBlocks
from legato.layers.kv_cache import LayerCache
from legato.layers.linear import Linear
from legato.layers.norm import RMSNorm
from legato.layers.shard import Heads
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.mamba import step_sequences
from legato.models.rows import merged_ranges
from legato.models.targets import MatrixPart
from legato.models.weights import Weights
from legato.quantization.stored import Ranges

ATTENTION, DELTA_NET = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """What config.json says about these layers."""

    num_keys: int  # heads of queries and keys
    num_values: int  # heads of values, each with a state; some in a row share a head of queries and keys
    key_size: int
    value_size: int
    width: int  # of the convolution
    norm_eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> DeltaShape:
        keys = config.keys
        num_keys, num_values = (
            keys.count(f"linear_num_{part}_heads", default=default) for part, default in (("key", 16), ("value", 32))
        )
        if num_values % num_keys:
            raise ModelFileError(
                f"{keys.path}: 'linear_num_value_heads' is {num_values}, not a multiple of the {num_keys} of"
                " 'linear_num_key_heads'"
            )
        return cls(
            num_keys=num_keys,
            num_values=num_values,
            key_size=keys.count("linear_key_head_dim", default=128),
            value_size=keys.count("linear_value_head_dim", default=128),
            width=keys.count("linear_conv_kernel_dim", default=4),
            norm_eps=keys.number("rms_norm_eps", default=1e-6),
        )

    def heads(self, weights: Weights) -> Heads:
        """Of this shard: value heads read heads of keys as query heads do."""
        return weights.heads(self.num_values, self.num_keys, self.key_size, self.value_size)

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values of all shards."""
        return 2 * self.num_keys * self.key_size + self.num_values * self.value_size

    def state_shapes(self, heads: Heads) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a sequence on this shard: the state, and the last inputs of the convolution."""
        channels = 2 * heads.num_kv_heads * self.key_size + heads.num_heads * self.value_size
        return (heads.num_heads, self.key_size, self.value_size), (channels, self.width - 1)


def layer_types(config: ModelConfig) -> list[str]:
    """ATTENTION or DELTA_NET of each layer."""
    keys, known = config.keys, (ATTENTION, DELTA_NET)
    every = keys.count("full_attention_interval", default=4)
    types = keys.texts("layer_types", length=config.num_layers)
    if types is None:
        return [known[(layer + 1) % every > 0] for layer in range(config.num_layers)]
    if unknown := set(types) - set(known):
        raise UnsupportedModel(f"config.json: layer type '{min(unknown)}' is not supported; known: {', '.join(known)}")
    return types


def grouped_projections(hidden: int, shape: DeltaShape, weights: Weights, name: str) -> tuple[Linear, Linear]:
    """Queries, keys, values and gates of this shard side by side, and what strengths and decays are made of. From two
    matrices, in which what belongs to a head of keys is together: query and key, values, gates; strengths, decays."""
    heads, size = shape.heads(weights), shape.value_size
    group = shape.num_values // shape.num_keys
    whole = 2 * (shape.key_size + group * size)
    keys, values = range(heads.first_kv, heads.last_kv), range(heads.first, heads.last)
    begins = [head * whole + part * shape.key_size for part in range(2) for head in keys]
    rows = [(begin, begin + shape.key_size) for begin in begins]
    for part in range(2):
        first = 2 * shape.key_size + part * group * size
        begins = [head // group * whole + first + head % group * size for head in values]
        rows += [(begin, begin + size) for begin in begins]
    places = [(head // group * 2 + part) * group + head % group for part in range(2) for head in values]
    inputs = MatrixPart(f"{name}.in_proj_qkvz", shape.num_keys * whole, merged_ranges(rows))
    rates = MatrixPart(f"{name}.in_proj_ba", 2 * shape.num_values, merged_ranges([(row, row + 1) for row in places]))
    return weights.rows([inputs], hidden), weights.rows([rates], hidden, quantize=False)


def separate_projections(hidden: int, shape: DeltaShape, weights: Weights, name: str) -> tuple[Linear, Linear]:
    """The same from four matrices."""
    heads, size = shape.heads(weights), shape.value_size
    values = [(heads.first * size, heads.last * size)]
    inputs = [
        MatrixPart(f"{name}.in_proj_qkv", shape.num_channels, _channel_rows(shape, heads)),
        MatrixPart(f"{name}.in_proj_z", shape.num_values * size, values),
    ]
    places = [(heads.first, heads.last)]
    rates = [MatrixPart(f"{name}.in_proj_{part}", shape.num_values, places) for part in "ba"]
    return weights.rows(inputs, hidden), weights.rows(rates, hidden, quantize=False)


def _channel_rows(shape: DeltaShape, heads: Heads) -> Ranges:
    """This shard's, where queries, keys and values are behind each other."""
    first, last = heads.first_kv * shape.key_size, heads.last_kv * shape.key_size
    begin = shape.num_keys * shape.key_size
    values = (2 * begin + heads.first * shape.value_size, 2 * begin + heads.last * shape.value_size)
    return merged_ranges([(first, last), (begin + first, begin + last), values])


class DeltaNet:
    """This shard's heads of one layer."""

    def __init__(
        self, hidden: int, shape: DeltaShape, weights: Weights, name: str, projections: tuple[Linear, Linear]
    ) -> None:
        heads = shape.heads(weights)
        self.inputs, self.rates = projections
        self.num_values = heads.num_heads
        _, (self.num_channels, _) = shape.state_shapes(heads)
        channels, cut = {0: _channel_rows(shape, heads)}, {0: [(heads.first, heads.last)]}
        taps = weights.tensor(f"{name}.conv1d.weight", (shape.num_channels, 1, shape.width), channels)
        self.conv = taps[:, 0].contiguous()
        self.decay_rates = torch.exp(weights.tensor(f"{name}.A_log", (shape.num_values,), cut, torch.float32))
        self.decay_bias = weights.tensor(f"{name}.dt_bias", (shape.num_values,), cut, torch.float32)
        self.norm = RMSNorm(weights.tensor(f"{name}.norm.weight", (shape.value_size,)), shape.norm_eps)
        self.output = weights.output(f"{name}.out_proj", heads, hidden)

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        sequences = step_sequences(step, cache)
        projected = self.inputs(x)
        qkv, gates = projected[:, : self.num_channels], projected[:, self.num_channels :]
        strengths, decays = self.rates(x).split(self.num_values, dim=1)
        last_inputs = StateBlocks(cache.values, cache.values[:, :0], sequences)  # all channels in one tensor
        qkv = short_convolution(qkv, self.conv, None, 0, last_inputs)
        read = delta_rule(qkv, decays, strengths, self.decay_rates, self.decay_bias, cache.keys, sequences)
        read, gates = step.needed_after_attention(read), step.needed_after_attention(gates)
        gated = self.norm(read).flatten(1) * F.silu(gates.float())
        return self.output(gated.to(x.dtype))
