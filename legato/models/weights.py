"""Weights are pulled by name: a model's constructor asks for what it needs and so shows the checkpoint's layout.

`Weights` reads this shard's part of each tensor and no more, casts, fuses and keeps account: a tensor that is missing,
left over or of the wrong shape is an error that names it. Shapes are those of the checkpoint, whole; names of linears
come without `.weight` and `.bias`.

    weights.tensor(name, shape)             norms and the like: whole, on every shard
    weights.layer_norm(name, size, eps)     a LayerNorm of such
    weights.embedding(name, vocab, hidden)  cut by rows
    weights.qkv(names, heads, in)           cut by heads; three matrices or a fused one
    weights.output(name, heads, out)        cut by heads, summed over the shards
    weights.column(names, out, in)          cut by outputs; several are stacked into one product
    weights.row(name, out, in)              cut by inputs, summed over the shards
    weights.per_head(name, heads, size, in) cut by query heads
    weights.linear(names, out, in)          whole, on every shard
    weights.experts(name, …)                all of them on every shard, cut by their inner dimension
    weights.head(name, embedding, ...)      cut by rows, gathered
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError
from legato.layers.linear import Embedding, Head, Linear, RowLinear
from legato.layers.norm import LayerNorm
from legato.layers.shard import Heads, Shard
from legato.models.sources import Staging, TensorSource
from legato.quantization.dense import Weight, dense_weight

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all
Ranges = Sequence[tuple[int, int]]  # [first, last) of some dimension, in the order wanted
# How a fused checkpoint has its heads:
#   concatenated   all of q, all of k, all of v
#   grouped        for each key head the queries that read it, then its key and its value; where every query has a key
#                  head of its own (BLOOM, GPT-NeoX) that is q, k, v of the first head, of the second, …
QkvLayout = Literal["concatenated", "grouped"]

# What old checkpoints carry along and no model reads.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A matrix [out_features, in] of the checkpoint, and the rows of it that are wanted; None for all."""

    name: str
    out_features: int
    rows: Ranges | None = None


class RowOptions(TypedDict, total=False):
    """Of `output` and `row`. Without `reduce` the sum over the shards is left to the caller."""

    bias: bool
    transposed: bool  # [in, out] in the file, as GPT-2 has it
    reduce: bool


class Weights:
    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.shard = shard or Shard()
        self._source = source
        self._names = source.names()
        self._unused = set(self._names)
        self._progress = progress
        self._staging = Staging(device)
        self._total = source.nbytes() // self.shard.world_size
        self._read_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def prefix(self, usual: str, name: str) -> str:
        """`usual` where the checkpoint's names begin with it, as that of the tensor `name` shows. Many old checkpoints
        are of the model without its head, and have no prefix."""
        return "" if name in self and usual + name not in self else usual

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Mapping[int, Ranges] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor that has this `shape` in the checkpoint. `cut` maps dimensions to the ranges that are wanted of
        them; `dtype` is for what must be more exact than the model."""
        if name not in self._names:
            raise ModelFileError(f"the checkpoint has no tensor '{name}'")
        self._unused.discard(name)
        found = self._source.shape(name)
        if found != shape:
            raise ModelFileError(f"tensor '{name}' has shape {found}, the configuration says {shape}")
        raw = self._read(name, shape, cut or {})
        if not raw.is_floating_point():
            raise ModelFileError(f"tensor '{name}' has type {raw.dtype}; only floating-point weights can be loaded")
        self._read_bytes += raw.nbytes
        if self._progress is not None:
            self._progress(self._read_bytes, self._total)
        made = self._staging.copy(raw).to(dtype or self.dtype)
        if made.data_ptr() != raw.data_ptr():
            self._source.forget(name)
        return made

    def _read(
        self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges], index: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """Range by range, dimension by dimension."""
        dim = len(index)
        if not any(other >= dim for other in cut):
            return self._source.read(name, index)
        ranges = cut.get(dim, [(0, shape[dim])])
        pieces = [self._read(name, shape, cut, (*index, slice(first, last))) for first, last in ranges]
        return _joined(pieces, dim)

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        weight = self.tensor(f"{name}.weight", (size,))
        return LayerNorm(weight, self.tensor(f"{name}.bias", (size,)) if bias else None, eps, size)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Each shard has equally many rows; what reaches beyond the vocabulary is zero."""
        first, _ = self.shard.padded_span(vocab_size)
        return Embedding(self._vocabulary(f"{name}.weight", (vocab_size, hidden_size)), first, self.shard)

    def head(
        self, name: str, embedding: Embedding, vocab_size: int, hidden_size: int, *, tied: bool, bias: bool = False
    ) -> Head:
        """The embedding once more if it is `tied`, or if the checkpoint has no other matrix."""
        tied = tied or f"{name}.weight" not in self
        weight = embedding.weight if tied else self._vocabulary(f"{name}.weight", (vocab_size, hidden_size))
        self.skip(f"{name}.weight")  # a checkpoint that says "tied" may still carry a copy
        added = self._vocabulary(f"{name}.bias", (vocab_size,)) if bias else None
        return Head(dense_weight(weight, added), vocab_size, self.shard)

    def heads(self, num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> Heads:
        """This shard's part of the heads."""
        return self.shard.heads(num_heads, num_kv_heads, head_dim, v_head_dim)

    def qkv(
        self,
        names: str | Sequence[str],
        heads: Heads,
        in_features: int,
        *,
        bias: bool = False,
        layout: QkvLayout = "concatenated",
        transposed: bool = False,
        neighbours: int = 0,
    ) -> Linear:
        """Queries, keys and values of this shard's heads as one product, for `SelfAttention`: from the three matrices
        `names`, from two (the second one has keys and then values), or from one fused matrix in some `layout`.

        `neighbours` is for checkpoints that turn dimension 2i of a head with 2i + 1 (GPT-J): the rows of the first so
        many dimensions of each head of q and k are put into the order of `Rotary`. Scores stay the same.
        """
        ranges = _qkv_rows(heads, layout)
        num_values = heads.all_kv_heads * heads.v_head_dim
        if isinstance(names, str):
            total = (heads.all_heads + heads.all_kv_heads) * heads.head_dim + num_values
            parts = [MatrixPart(names, total, _merged([span for spans in ranges for span in spans]))]
        else:
            counts = [heads.all_heads * heads.head_dim, heads.all_kv_heads * heads.head_dim, num_values]
            alone = _qkv_rows(heads, "separate")
            if len(names) == 2:
                values = [(first + counts[1], last + counts[1]) for first, last in alone.pop()]
                counts, alone[1] = [counts[0], counts[1] + num_values], alone[1] + values
            parts = [MatrixPart(name, n, _merged(spans)) for name, n, spans in zip(names, counts, alone, strict=True)]
        order = _without_neighbours(heads, neighbours) if neighbours else None
        return Linear(self._weight(parts, in_features, None, bias, transposed, order))

    def output(self, name: str, heads: Heads, out_features: int, **how: Unpack[RowOptions]) -> RowLinear:
        """The projection behind attention: its inputs are the heads."""
        size = heads.v_head_dim
        columns = (heads.first * size, heads.last * size)
        return self._row(name, out_features, heads.all_heads * size, columns, **how)

    def column(
        self,
        names: str | Sequence[str],
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        fused: int = 1,
    ) -> Linear:
        """Matrices [out, in] stacked into one product, as gate and up are: one launch, not two. Each shard has its
        span of the outputs of each. `fused` is how many of them stand behind each other in one matrix [fused out, in].
        """
        first, last = self.shard.span(out_features)
        rows = [(i * out_features + first, i * out_features + last) for i in range(fused)]
        parts = [MatrixPart(name, fused * out_features, rows) for name in _as_list(names)]
        return Linear(self._weight(parts, in_features, None, bias, transposed))

    def row(self, name: str, out_features: int, in_features: int, **how: Unpack[RowOptions]) -> RowLinear:
        """What comes behind `column`: each shard brings its span of the inputs."""
        return self._row(name, out_features, in_features, self.shard.span(in_features), **how)

    def linear(
        self,
        names: str | Sequence[str],
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """Whole on every shard: routers of experts, projections to something small. `order` is that of the outputs
        where it should not be the checkpoint's."""
        parts = [MatrixPart(name, out_features) for name in _as_list(names)]
        return Linear(self._weight(parts, in_features, None, bias, transposed, order))

    def per_head(
        self, name: str, heads: Heads, size: int, in_features: int, order: torch.Tensor | None = None
    ) -> Linear:
        """`size` outputs for each query head, in the checkpoint's order or in this one, which is that of one head."""
        rows = [(heads.first * size, heads.last * size)]
        if order is not None:
            order = (torch.arange(heads.num_heads)[:, None] * size + order).flatten()
        return Linear(
            self._weight([MatrixPart(name, heads.all_heads * size, rows)], in_features, None, False, False, order)
        )

    def experts(
        self, name: str, num_experts: int, inner: int, hidden: int, parts: tuple[str, str, str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """gate and up [num_experts, 2 inner, hidden] and down [num_experts, hidden, inner] with our span of `inner`.

        Checkpoints have three matrices for each expert, `parts` by name (gate, up, down), or all experts in two.
        """
        first, last = span = self.shard.span(inner)
        if f"{name}.gate_up_proj" in self:
            halves = [span, (inner + first, inner + last)]
            gate_up = self.tensor(f"{name}.gate_up_proj", (num_experts, 2 * inner, hidden), {1: halves})
            down = self.tensor(f"{name}.down_proj", (num_experts, hidden, inner), {2: [span]})
            return gate_up.contiguous(), down.contiguous()
        # Expert by expert into place: a layer of them is too large to be there twice.
        gate_up, down = (
            torch.empty(num_experts, *size, dtype=self.dtype, device=self.device)
            for size in ((2, last - first, hidden), (hidden, last - first))
        )
        for expert in range(num_experts):
            gate, up, out = (f"{name}.{expert}.{part}.weight" for part in parts)
            gate_up[expert, 0] = self.tensor(gate, (inner, hidden), {0: [span]})
            gate_up[expert, 1] = self.tensor(up, (inner, hidden), {0: [span]})
            down[expert] = self.tensor(out, (hidden, inner), {1: [span]})
        return gate_up.flatten(1, 2), down

    def skip(self, name: str) -> None:
        """`name` may be there and need not be read."""
        self._unused.discard(name)

    def skip_below(self, prefix: str) -> None:
        """The same for every name that begins with `prefix` and a dot: a part of the model that is not served."""
        self._unused = {name for name in self._unused if not name.startswith(f"{prefix}.")}

    def check_all_used(self) -> None:
        left = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIXES))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ModelFileError(f"the checkpoint has tensors that the model does not: {', '.join(left[:3])}{more}")

    def _row(
        self,
        name: str,
        out_features: int,
        in_features: int,
        columns: tuple[int, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        reduce: bool = True,
    ) -> RowLinear:
        # In the sum over the shards the bias must count once.
        has_bias = bias and self.shard.rank == 0
        if bias:
            self.skip(f"{name}.bias")
        weight = self._weight([MatrixPart(name, out_features)], in_features, columns, has_bias, transposed)
        return RowLinear(weight, self.shard, reduce)

    def _weight(
        self,
        parts: Sequence[MatrixPart],
        in_features: int,
        columns: tuple[int, int] | None,
        bias: bool,
        transposed: bool,
        order: torch.Tensor | None = None,
    ) -> Weight:
        """The one place where a matrix gets its format. `transposed` is [in, out] in the file, as GPT-2 has it."""
        matrices = []
        for part in parts:
            cut = {} if self._is_all(part.rows, part.out_features) else {0: part.rows or []}
            if columns is not None and not self._is_all([columns], in_features):
                cut[1] = [columns]
            shape = (part.out_features, in_features)
            if transposed:
                cut, shape = {1 - dim: ranges for dim, ranges in cut.items()}, (in_features, part.out_features)
            matrix = self.tensor(f"{part.name}.weight", shape, cut)
            matrices.append(matrix.t().contiguous() if transposed else matrix)
        biases = []
        for part in parts if bias else []:
            cut = {} if self._is_all(part.rows, part.out_features) else {0: part.rows or []}
            biases.append(self.tensor(f"{part.name}.bias", (part.out_features,), cut))
        stacked = [_joined(tensors, 0) for tensors in (matrices, biases) if tensors]
        if order is not None:
            stacked = [tensor[order.to(tensor.device)] for tensor in stacked]
        return dense_weight(*stacked)

    def _vocabulary(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """This shard's equal share of the rows, filled up with zeros."""
        first, last = self.shard.padded_span(shape[0])
        inside = [(min(first, shape[0]), min(last, shape[0]))]
        rows = self.tensor(name, shape, {} if self._is_all(inside, shape[0]) else {0: inside})
        missing = last - first - rows.shape[0]
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows

    @staticmethod
    def _is_all(ranges: Ranges | None, size: int) -> bool:
        return ranges is None or list(ranges) == [(0, size)]


def _qkv_rows(heads: Heads, layout: QkvLayout | Literal["separate"]) -> list[list[tuple[int, int]]]:
    """Where the heads of this shard are: row ranges of q, of k and of v, one for each head."""
    size, v_size = heads.head_dim, heads.v_head_dim
    group = heads.all_heads // heads.all_kv_heads
    queries, keys = range(heads.first, heads.last), range(heads.first_kv, heads.last_kv)
    if layout == "grouped":
        whole = (group + 1) * size + v_size
        q = [head // group * whole + head % group * size for head in queries]
        k = [head * whole + group * size for head in keys]
        v = [head * whole + (group + 1) * size for head in keys]
    else:
        k_begin = heads.all_heads * size if layout == "concatenated" else 0
        v_begin = k_begin + heads.all_kv_heads * size if layout == "concatenated" else 0
        q = [head * size for head in queries]
        k = [k_begin + head * size for head in keys]
        v = [v_begin + head * v_size for head in keys]
    return [[(row, row + width) for row in rows] for rows, width in ((q, size), (k, size), (v, v_size))]


def _without_neighbours(heads: Heads, dim: int) -> torch.Tensor:
    """Order of the rows of a packed projection: in each head of q and k the even ones of the first `dim`, the odd ones
    of them, the rest."""
    head = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2), torch.arange(dim, heads.head_dim)))
    num_turned = heads.num_heads + heads.num_kv_heads
    turned = (torch.arange(num_turned)[:, None] * heads.head_dim + head).flatten()
    end = num_turned * heads.head_dim
    return torch.cat((turned, torch.arange(end, end + heads.num_kv_heads * heads.v_head_dim)))


def _merged(ranges: Ranges) -> Ranges:
    """Neighbours as one: fewer reads."""
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _as_list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
