"""What decoders have in common: layers on a residual stream, between an embedding and a head.

A family's constructor fills in a `Decoder` with these layers; it writes only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from legato.kernels.norm import is_in_parts
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import KVCache, KVShape, LayerCache
from legato.layers.linear import Embedding, Head, RowLinear
from legato.layers.mlp import Product
from legato.layers.norm import RMSNorm
from legato.layers.shard import Heads, Shard
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.weights import Weights


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...


class Layer(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x` is what the layer before added to the residual stream, not yet added: a norm does that on the way.

        Behind attention it goes on with the tokens that `step.needed_after_attention` leaves.
        """
        ...


class TokenMixer(Protocol):
    """What a layer has before its MLP: where a token sees others."""

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        """[T, hidden_size] -> the same of the tokens that `step.needed_after_attention` leaves."""
        ...


class Attention:
    """Self-attention with the projections before and behind it."""

    def __init__(self, qkv: Product, attention: SelfAttention, output: Product) -> None:
        self.qkv = qkv
        self.attention = attention
        self.output = output

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: Step) -> torch.Tensor:
        return self.output(self.attention(self.qkv(x), cache, step))


class Clipped:
    """A packed projection, every number of it within [-limit, limit]."""

    def __init__(self, linear: Product, limit: float) -> None:
        self.linear = linear
        self.limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).clamp_(-self.limit, self.limit)


class SequentialLayer:
    """Attention, then the MLP, each behind a norm of its own: GPT-2's order and that of most."""

    def __init__(self, norm: Norm, attention: TokenMixer, mlp_norm: Norm, mlp: Product) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def leave_parts(self) -> None:
        """Let its norms and the next layer's add up what its products leave in parts, and quantize what its products
        want in 8 bits."""
        for product in (getattr(self.attention, "output", None), getattr(self.mlp, "down", None)):
            if isinstance(product, RowLinear):
                product.leave_parts()
        qkv, gate_up = getattr(self.attention, "qkv", None), getattr(self.mlp, "gate_up", None)
        behind_norms = ((self.norm, qkv), (self.mlp_norm, gate_up))
        for norm, product in behind_norms:
            if isinstance(norm, RMSNorm):
                norm.reader = getattr(product, "weight", None)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.norm.add(x, residual)
        normed, residual = self.mlp_norm.add(self.attention(normed, cache, step), step.needed_after_attention(residual))
        return self.mlp(normed), residual


class ParallelLayer:
    """Attention and the MLP read the same residual stream, through one norm or through two.

    Their projections leave the sum over the shards to this layer (`reduce=False`), which adds them first: one sum.
    """

    def __init__(self, norm: Norm, attention: Attention, mlp_norm: Norm | None, mlp: Product, shard: Shard) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.shard = shard

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.norm.add(x, residual)
        attended, residual = self.attention(normed, cache, step), step.needed_after_attention(residual)
        normed = step.needed_after_attention(normed) if self.mlp_norm is None else self.mlp_norm(residual)
        return self.shard.all_reduce(attended.add_(self.mlp(normed))), residual


class StateTap:
    """Gives a reader the inputs of some layers: the hidden states of all tokens of a forward pass, and their slots."""

    def __init__(self, layers: Sequence[int], keep: Callable[[list[torch.Tensor], torch.Tensor], None]) -> None:
        self._layers, self._keep = tuple(layers), keep
        self._states: list[torch.Tensor] = []

    def take(self, number: int, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> None:
        """What layer `number` gets."""
        if number not in self._layers:
            return
        whole = x if residual is None else residual + (x.sum(0) if is_in_parts(x, residual) else x)
        self._states.append(whole)
        if number == self._layers[-1]:
            self._keep(self._states, step.slots)
            self._states = []


class Decoder:
    """A `CausalModel` whose attributes the family's constructor fills in."""

    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm  # behind the last layer
    head: Head
    can_capture = True
    tap: StateTap | None = None

    def __init__(self, config: ModelConfig, weights: Weights, heads: Heads) -> None:
        self.config = replace(config, num_kv_heads=heads.all_kv_heads)  # which config.json need not say
        layers = weights.shard.layers(config.num_layers)
        size = (len(layers), heads.num_kv_heads, heads.head_dim)
        self.kv_shape = KVShape(*size, weights.dtype, scales=weights.kv_scales(layers))

    def embed(self, step: Step) -> torch.Tensor:
        """What the first layer reads. For families that add positions or a norm to it."""
        return self.embedding(step.input_ids)

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        x = self.embed(step) if step.hidden is None else step.hidden
        residual: torch.Tensor | None = None
        for number, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if self.tap is not None:
                self.tap.take(number, x, residual, step)
            if layer is self.layers[-1]:
                step = replace(step, in_last_layer=True)
            x, residual = layer(x, residual, layer_cache, step)
        if residual is None:
            return x
        return self.norm.add(x, residual)[1] if is_in_parts(x, residual) else x.add_(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))
