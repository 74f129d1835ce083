"""Llama-like decoders on a CPU: a forward is one call of the C library, for all layers.

`on_host` looks at a model that its family has built. Where every layer is what the library computes (RMSNorm, attention
with rotation, a gated MLP, all matrices packed), a `HostDecoder` takes its place; other models stay as they are and use
packed products one by one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from legato.cpu.library import (
    ACTIVATIONS,
    GROUP,
    LANES,
    MAX_HEAD_DIM,
    MAX_SHARING_HEADS,
    LayerPointers,
    Library,
    Shape,
    StepPointers,
    library,
)
from legato.kernels.attention.paged import PagedContext
from legato.layers.attention import SelfAttention
from legato.layers.kv_cache import KVCache
from legato.layers.linear import AbsentEmbedding, AbsentHead, Head, Linear, PackedEmbedding, RowLinear
from legato.layers.mlp import GatedMLP
from legato.layers.norm import RMSNorm
from legato.layers.rotary import Rotary
from legato.layers.step import Step
from legato.models.decoder import Attention, Decoder, SequentialLayer
from legato.models.registry import CausalModel, LimitedModel
from legato.quantization.host import HostWeight

logger = logging.getLogger(__name__)
T = TypeVar("T")
CALIBRATION_TOKENS = 64
IN_TORCH = "Layers are computed by torch, not by the CPU kernels"
CACHE_DTYPE = torch.float16  # of keys and values: rounded less than the products round


class LibraryLayer:
    """The parts of a layer, checked to be those that the library computes."""

    def __init__(self, layer: SequentialLayer) -> None:
        self.norm = _checked(layer.norm, RMSNorm)
        self.mlp_norm = _checked(layer.mlp_norm, RMSNorm)
        attention = _checked(layer.attention, Attention)
        self.attention = _checked(attention.attention, SelfAttention)
        mlp = _checked(layer.mlp, GatedMLP)
        self.qkv = _checked(_checked(attention.qkv, Linear).weight, HostWeight).packed
        self.output = _checked(_checked(attention.output, RowLinear).weight, HostWeight).packed
        self.gate_up = _checked(_checked(mlp.gate_up, Linear).weight, HostWeight).packed
        self.down = _checked(_checked(mlp.down, RowLinear).weight, HostWeight).packed
        if mlp.kind not in ACTIVATIONS:
            raise NotLibraryLayer(f"the activation is {mlp.kind}")
        self.activation = ACTIVATIONS[mlp.kind]
        attention_ = self.attention
        self.rotary = _checked(attention_.rotary, Rotary)
        if attention_.scoring.alibi_slopes is not None:
            raise NotLibraryLayer("positions are not rotations")
        if attention_.scoring.sinks is not None:
            raise NotLibraryLayer("attention has sinks")
        if attention_.head_dim != attention_.v_head_dim or attention_.head_dim > MAX_HEAD_DIM:
            raise NotLibraryLayer(f"heads have {attention_.head_dim} dimensions")
        if attention_.num_heads > MAX_SHARING_HEADS * attention_.num_kv_heads:
            raise NotLibraryLayer(f"{attention_.num_heads} heads share {attention_.num_kv_heads} heads of keys")
        sizes = (attention_.head_dim, self.norm.weight.shape[0], self.down.in_features)
        if any(size % GROUP for size in sizes):
            raise NotLibraryLayer(f"sizes {sizes} are not multiples of {GROUP}")
        self._check_sizes(*sizes)
        norms = [
            None if norm is None else _checked(norm, RMSNorm)
            for norm in (self.norm, self.mlp_norm, attention_.q_norm, attention_.k_norm)
        ]
        if any(norm is not None and norm.eps != self.norm.eps for norm in norms):
            raise NotLibraryLayer("its norms differ in their epsilon")
        # Kept here because the struct has only their addresses.
        self.norms = [None if norm is None else norm.weight.float().contiguous() for norm in norms]

    def _check_sizes(self, head_dim: int, hidden: int, inner: int) -> None:
        """The library trusts them."""
        num_heads = self.attention.num_heads
        found = {name: getattr(self, name) for name in ("qkv", "output", "gate_up", "down")}
        expected = {
            "qkv": ((num_heads + 2 * self.attention.num_kv_heads) * head_dim, hidden),
            "output": (hidden, num_heads * head_dim),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        sizes = {name: (packed.out_features, packed.in_features) for name, packed in found.items()}
        assert sizes == expected, (sizes, expected)

    def shape(self, num_layers: int) -> Shape:
        """What must be the same in all layers."""
        attention = self.attention
        return Shape(
            num_layers=num_layers,
            hidden=self.norm.weight.shape[0],
            inner=self.down.in_features,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rope_dim=self.rotary.dim,
            eps=self.norm.eps,
            scale=attention.scoring.scale,
            soft_cap=attention.scoring.soft_cap,
            activation=self.activation,
            cos_sin=self.rotary.cos_sin.data_ptr(),
        )

    def pointers(self) -> LayerPointers:
        norm, mlp_norm, q_norm, k_norm = (None if weight is None else weight.data_ptr() for weight in self.norms)
        return LayerPointers(
            qkv=self.qkv.address,
            output=self.output.address,
            gate_up=self.gate_up.address,
            down=self.down.address,
            norm=norm,
            mlp_norm=mlp_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            window=self.attention.scoring.window,
        )


class NotLibraryLayer(Exception):
    """A part that the library does not compute."""


def _checked(part: object, kind: type[T]) -> T:
    """Exactly of this class: one that derives from it may compute something else."""
    if type(part) is not kind:
        raise NotLibraryLayer(f"{type(part).__name__} is not {kind.__name__}")
    return part


class HostDecoder:
    """A `CausalModel` in place of the decoder that it is made of."""

    can_capture = False

    def __init__(self, model: Decoder, layers: Sequence[LibraryLayer], kernels: Library) -> None:
        self.config = model.config
        self.kv_shape = replace(model.kv_shape, dtype=CACHE_DTYPE)
        self._model = model
        self._library = kernels
        self._layers = layers
        self._shape = layers[0].shape(len(layers))
        self._pointers = (LayerPointers * len(layers))(*(layer.pointers() for layer in layers))
        self._cache: KVCache | None = None  # whose addresses are in the pointers, if the library reads it
        self._reads_cache = False
        # A stage of a pipeline may have neither.
        absent = (isinstance(model.embedding, AbsentEmbedding), isinstance(model.head, AbsentHead))
        self._embedding = None if absent[0] else _checked(model.embedding, PackedEmbedding).packed.packed
        self._head = None if absent[1] else _checked(_checked(model.head, Head).weight, HostWeight).packed
        norm = _checked(model.norm, RMSNorm)
        self._norm, self._eps = norm.weight.float().contiguous(), norm.eps
        # Pipeline stages calibrate one after the other (`PipelineStage.calibrate`).
        if self._embedding is not None and self._head is not None and not norm.weight.is_meta:
            self.calibrate()

    def calibrate(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Lets the library see some tokens, so that it knows which inputs of the products are rounded twice. `x`, which
        is overwritten, is what the layers before these made of the tokens; without it they are embedded here. Returns
        the states behind the last layer. Once, before all forwards."""
        if x is None:
            assert self._embedding is not None, "only the first stage embeds tokens"
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(self._embedding.out_features, (CALIBRATION_TOKENS,), generator=generator)
            x = self._embedding.rows(ids)
        order = torch.arange(CALIBRATION_TOKENS)
        positions = order % len(self._layers[0].rotary.cos_sin)  # of which there may be fewer
        count, tables = torch.tensor([CALIBRATION_TOKENS], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        num_values = CALIBRATION_TOKENS * self._shape.num_kv_heads * self._shape.head_dim
        keys, values = torch.zeros(2, num_values, dtype=CACHE_DTYPE)
        for pointers in self._pointers:  # one after the other
            pointers.keys, pointers.values = keys.data_ptr(), values.data_ptr()
        step = StepPointers(
            num_tokens=CALIBRATION_TOKENS,
            num_sequences=1,
            num_wanted=CALIBRATION_TOKENS,
            block_size=CALIBRATION_TOKENS,
            table_stride=1,
            positions=positions.data_ptr(),
            slots=order.data_ptr(),
            counts=count.data_ptr(),
            context_lens=count.data_ptr(),
            tables=tables.data_ptr(),
        )
        shape, out = ctypes.byref(self._shape), torch.empty_like(x)
        if self._library.calibrate(shape, self._pointers, ctypes.byref(step), x.data_ptr(), out.data_ptr()):
            raise MemoryError
        return out

    def limit(self, longest: int) -> None:
        if isinstance(self._model, LimitedModel):
            self._model.limit(longest)

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        context = step.on_host
        if context is None:
            return self._model.forward(step, cache)
        if not self._reads(cache):
            return self._in_torch(step, context, cache)
        if step.adapters is not None:  # the library knows no adapters
            with torch_layout(cache, _blocks_of(context)):
                return self._in_torch(step, context, cache)
        x = step.hidden
        if x is None:
            assert self._embedding is not None, "only the first stage embeds tokens"
            x = self._embedding.rows(step.input_ids)
        counts = np.array(context.query_lens, dtype=np.int32)
        wanted = step.logits_indices
        num_wanted = len(x) if wanted is None else len(wanted)
        tables = context.block_tables
        pointers = StepPointers(
            num_tokens=len(x),
            num_sequences=len(counts),
            num_wanted=num_wanted,
            block_size=context.block_size,
            table_stride=tables.stride(0),
            positions=step.positions.data_ptr(),
            slots=step.slots.data_ptr(),
            counts=counts.ctypes.data,
            context_lens=step.context_lens.data_ptr(),
            tables=tables.data_ptr(),
            wanted=None if wanted is None else wanted.data_ptr(),
        )
        out = torch.empty(num_wanted, x.shape[1])
        shape, addresses = ctypes.byref(self._shape), ctypes.byref(pointers)
        result = self._library.forward(shape, self._pointers, addresses, x.data_ptr(), out.data_ptr())
        assert result != -2, "wanted tokens are not in ascending order"
        if result:
            raise MemoryError
        return out

    def _in_torch(self, step: Step, context: PagedContext, cache: KVCache) -> torch.Tensor:
        # What torch computes in is float32, whatever the cache has.
        return self._model.forward(replace(step, on_host=replace(context, dtype=torch.float32)), cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if (lora := self._model.head.lora) is not None and lora.is_active:
            return self._model.logits(hidden)
        assert self._head is not None, "only the last stage computes logits"
        return self._head.apply(hidden, self._norm, self._eps, twice=True)

    def likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of logits the likeliest token, and its log probability: NaN if a logit is not finite."""
        ids, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._library.best(logits.data_ptr(), *logits.shape, ids.data_ptr(), logprobs.data_ptr())
        return ids, logprobs

    def _reads(self, cache: KVCache) -> bool:
        """Whether the library can read this cache. From then on its addresses are in the pointers."""
        if cache is not self._cache:
            dtype, size = cache.layers[0].keys.dtype, cache.block_size
            self._cache, self._reads_cache = cache, dtype == CACHE_DTYPE and not size % LANES
            if not self._reads_cache:
                logger.info("%s: the KV cache has %s in blocks of %d tokens", IN_TORCH, str(dtype)[6:], size)
                return False
            for pointers, layer in zip(self._pointers, cache.layers, strict=True):
                pointers.keys, pointers.values = layer.keys.data_ptr(), layer.values.data_ptr()
        return self._reads_cache


@contextmanager
def torch_layout(cache: KVCache, blocks: torch.Tensor) -> Iterator[None]:
    """Keys and values of some blocks [slots, heads, head_dim] while the block runs, as torch's attention reads them.
    The library has them by 16 slots, keys [heads, head_dim, 16] and values [heads, 16, head_dim] (src/legato.h)."""
    *_, num_heads, head_dim = cache.layers[0].keys.shape
    theirs = (-1, LANES, num_heads, head_dim)  # of the library's tensors the first axis is the same
    ours = {"keys": (-1, num_heads, head_dim, LANES), "values": (-1, num_heads, LANES, head_dim)}
    to_torch = {"keys": (0, 3, 1, 2), "values": (0, 2, 1, 3)}
    to_ours = {"keys": (0, 2, 3, 1), "values": (0, 2, 1, 3)}

    def convert(shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, tuple[int, ...]]) -> None:
        for layer in cache.layers:
            for name in ("keys", "values"):
                tensor: torch.Tensor = getattr(layer, name)
                found = tensor[blocks]
                tensor[blocks] = found.view(shapes[name]).permute(axes[name]).reshape(found.shape)

    convert(ours, to_torch)
    try:
        yield
    finally:
        convert(dict.fromkeys(ours, theirs), to_ours)


def _blocks_of(context: PagedContext) -> torch.Tensor:
    """All blocks that a step reads or writes, each once: sequences may share them."""
    counts = [-(-length // context.block_size) for length in context.context_lens]
    used = [table[:count] for table, count in zip(context.block_tables, counts, strict=True)]
    return torch.from_numpy(np.unique(torch.cat(used).numpy()).astype(np.int64))


def on_host(model: CausalModel) -> CausalModel:
    """The model with its forward in the library, if it fits; else the model itself, and the log says why."""
    kernels = library()
    if kernels is None:
        return model
    try:
        decoder = _plain_decoder(model)
        layers = [LibraryLayer(_checked(layer, SequentialLayer)) for layer in decoder.layers]
        if any(bytes(layer.shape(0)) != bytes(layers[0].shape(0)) for layer in layers):
            raise NotLibraryLayer("layers differ in more than their weights and windows")
        return HostDecoder(decoder, layers, kernels)
    except NotLibraryLayer as reason:
        logger.info("%s: %s", IN_TORCH, reason)
        return model


def _plain_decoder(model: CausalModel) -> Decoder:
    """The model, if it computes what `Decoder` does between its embedding and its head."""
    kind = type(model)
    if not isinstance(model, Decoder):
        raise NotLibraryLayer(f"{kind.__name__} is not a {Decoder.__name__}")
    for name in ("embed", "forward", "logits"):
        if getattr(kind, name) is not getattr(Decoder, name):
            raise NotLibraryLayer(f"{kind.__name__} has its own `{name}`")
    return model
