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
    weights.rows(parts, in)                 the outputs that the caller names, stacked
    weights.row(name, out, in)              cut by inputs, summed over the shards
    weights.per_head(name, heads, size, in) cut by query heads
    weights.linear(names, out, in)          whole, on every shard
    weights.experts(name, …)                all of them on every shard, cut by their inner dimension
    weights.stacked_experts(names, …)       the same from matrices that have all experts below each other
    weights.head(name, embedding, ...)      cut by rows, gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F

from legato.layers.linear import AbsentEmbedding, AbsentHead, Embedding, Head, Linear, PackedEmbedding, RowLinear
from legato.layers.norm import LayerNorm
from legato.layers.shard import Heads
from legato.models.expert_matrices import ExpertMatrices, between_groups
from legato.models.rows import QkvLayout, merged_ranges, qkv_rows, without_neighbours
from legato.models.targets import MatrixPart
from legato.quantization.dense import Weight, dense_weight
from legato.quantization.host import HostWeight, host_weight
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.stored import MatrixSlice, Ranges
from legato.quantization.weight import Matrix, kinds_of, quantized_in, weight_of


class RowOptions(TypedDict, total=False):
    """Of `output` and `row`. Without `reduce` the sum over the shards is left to the caller."""

    bias: bool
    transposed: bool  # [in, out] in the file, as GPT-2 has it
    reduce: bool
    dtype: torch.dtype | None  # for what must be more exact than the model


class Weights(ExpertMatrices):
    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        weight = self.tensor(f"{name}.weight", (size,))
        return LayerNorm(weight, self.tensor(f"{name}.bias", (size,)) if bias else None, eps, size)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Each shard has equally many rows; what reaches beyond the vocabulary is zero."""
        if self.shard.stage > 0:
            return AbsentEmbedding(name, self.shard)
        first, last = self.shard.padded_span(vocab_size)
        embedding, parts = self._embedding(name, vocab_size, hidden_size, first), [MatrixPart(name, hidden_size)]
        return self._target(embedding, parts, vocab_size, columns=(first, last), is_embedding=True)

    def _embedding(self, name: str, vocab_size: int, hidden_size: int, first: int) -> Embedding:
        if self.packs and self.shard.world_size == 1:
            weight = self._packed_vocabulary(name, vocab_size, hidden_size)
            if isinstance(weight, HostWeight):
                return PackedEmbedding(weight, self.shard)
        return Embedding(self._vocabulary(f"{name}.weight", (vocab_size, hidden_size)), first, self.shard)

    def head(
        self,
        name: str,
        embedding: Embedding,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        bias: bool = False,
        normed: bool = False,
    ) -> Head:
        """The embedding once more if it is `tied`, or if the checkpoint has no other matrix; `normed` gives its rows
        the length one."""
        if self.shard.stage < self.shard.num_stages - 1:
            return AbsentHead(vocab_size, self.shard)
        if isinstance(embedding, AbsentEmbedding):
            is_tied = tied or not self.has_matrix(name)
            if is_tied or (self.packs and self.shard.world_size == 1 and not normed):
                made = self._embedding(embedding.name if is_tied else name, vocab_size, hidden_size, 0)
                embedding, tied = made, True
        if isinstance(embedding, PackedEmbedding) and not normed:
            return self._packed_head(name, embedding, vocab_size, hidden_size, tied, bias)
        if not tied and self._is_quantized(name):
            weight = self._quantized_head(name, vocab_size, hidden_size)
        else:
            tied = tied or f"{name}.weight" not in self
            weight = embedding.weight if tied else self._vocabulary(f"{name}.weight", (vocab_size, hidden_size))
            self.skip(f"{name}.weight")  # a checkpoint that says "tied" may still carry a copy
        weight = F.normalize(weight, dim=-1) if normed else weight
        added = self._vocabulary(f"{name}.bias", (vocab_size,)) if bias else None
        head, rows = Head(dense_weight(weight, added), vocab_size, self.shard), [self.shard.padded_span(vocab_size)]
        return self._target(head, [MatrixPart(name, vocab_size, rows)], hidden_size)

    def _packed_vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> Weight:
        """Never in the method of --quantize: embedding and head are worth their bits."""
        weight = host_weight([self._matrix(MatrixSlice(name, vocab_size, hidden_size), quantize=False, packs=True)])
        self.kinds.update(kinds_of(weight))
        return weight

    def _packed_head(
        self, name: str, embedding: PackedEmbedding, vocab_size: int, hidden_size: int, tied: bool, bias: bool
    ) -> Head:
        tied = tied or not self.has_matrix(name)
        weight: Weight = embedding.packed
        if tied:
            self.skip(f"{name}.weight")
        else:
            weight = self._packed_vocabulary(name, vocab_size, hidden_size)
        if bias:
            added = self._vocabulary(f"{name}.bias", (vocab_size,))
            weight = weight.with_bias(added) if isinstance(weight, HostWeight) else weight
        return self._target(Head(weight, vocab_size, self.shard), [MatrixPart(name, vocab_size)], hidden_size)

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
        ranges = qkv_rows(heads, layout)
        num_values = heads.all_kv_heads * heads.v_head_dim
        if isinstance(names, str):
            total = (heads.all_heads + heads.all_kv_heads) * heads.head_dim + num_values
            parts = [MatrixPart(names, total, merged_ranges([span for spans in ranges for span in spans]), True)]
        else:
            counts = [heads.all_heads * heads.head_dim, heads.all_kv_heads * heads.head_dim, num_values]
            alone = qkv_rows(heads, "separate")
            if len(names) == 2:
                values = [(first + counts[1], last + counts[1]) for first, last in alone.pop()]
                counts, alone[1] = [counts[0], counts[1] + num_values], alone[1] + values
            parts = [
                MatrixPart(name, count, merged_ranges(spans), is_attention=True)
                for name, count, spans in zip(names, counts, alone, strict=True)
            ]
        order = without_neighbours(heads, neighbours) if neighbours else None
        return self._linear(parts, in_features, bias, transposed, order)

    def output(self, name: str, heads: Heads, out_features: int, **how: Unpack[RowOptions]) -> RowLinear:
        """The projection behind attention: its inputs are the heads."""
        size = heads.v_head_dim
        columns = (heads.first * size, heads.last * size)
        part = MatrixPart(name, out_features, is_attention=True)
        return self._row(part, heads.all_heads * size, columns, **how)

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
        return self._linear(parts, in_features, bias, transposed)

    def rows(
        self, parts: Sequence[MatrixPart], in_features: int, *, bias: bool = False, quantize: bool = True
    ) -> Linear:
        """For layouts that only one family has. Without `quantize` what is dense stays dense, as in `linear`."""
        return self._linear(parts, in_features, bias, quantize=quantize)

    def row(self, name: str, out_features: int, in_features: int, **how: Unpack[RowOptions]) -> RowLinear:
        """What comes behind `column`: each shard brings its span of the inputs."""
        return self._row(MatrixPart(name, out_features), in_features, self.shard.span(in_features), **how)

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
        """Whole on every shard, and never quantized on load: routers of experts, projections to something small.
        `order` is that of the outputs where it should not be the checkpoint's."""
        parts = [MatrixPart(name, out_features) for name in _as_list(names)]
        return self._linear(parts, in_features, bias, transposed, order, quantize=False)

    def per_head(
        self,
        names: str | Sequence[str],
        heads: Heads,
        size: int,
        in_features: int,
        order: torch.Tensor | None = None,
        *,
        bias: bool = False,
    ) -> Linear:
        """`size` outputs for each query head, in the checkpoint's order or in this one, which is that of one head."""
        rows = [(heads.first * size, heads.last * size)]
        if order is not None:
            order = (torch.arange(heads.num_heads)[:, None] * size + order).flatten()
        parts = [MatrixPart(name, heads.all_heads * size, rows, is_attention=True) for name in _as_list(names)]
        return self._linear(parts, in_features, bias, order=order)

    def _row(
        self,
        part: MatrixPart,
        in_features: int,
        columns: tuple[int, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        reduce: bool = True,
        dtype: torch.dtype | None = None,
    ) -> RowLinear:
        # In the sum over the shards the bias must count once.
        has_bias = bias and self.shard.rank == 0
        if bias:
            self.skip(f"{part.name}.bias")
        weight = self._weight([part], in_features, columns, has_bias, transposed, dtype=dtype)
        return self._target(RowLinear(weight, self.shard, reduce), [part], in_features, columns=columns)

    def _linear(
        self,
        parts: Sequence[MatrixPart],
        in_features: int,
        bias: bool = False,
        transposed: bool = False,
        order: torch.Tensor | None = None,
        *,
        quantize: bool = True,
    ) -> Linear:
        weight = self._weight(parts, in_features, None, bias, transposed, order, quantize=quantize)
        return self._target(Linear(weight), parts, in_features, order=order)

    def _weight(
        self,
        parts: Sequence[MatrixPart],
        in_features: int,
        columns: tuple[int, int] | None,
        bias: bool,
        transposed: bool,
        order: torch.Tensor | None = None,
        *,
        quantize: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Weight:
        """`transposed` is [in, out] in the file, as GPT-2 has it; without `quantize` what is dense stays dense."""
        if columns is not None and self._is_all([columns], in_features):
            columns = None
        product_size = in_features * sum(part.out_features for part in parts)
        wanted = [
            MatrixSlice(part.name, part.out_features, in_features, None if self._is_all(part.rows, part.out_features)
                        else part.rows, columns, part.is_attention, product_size)
            for part in parts
        ]  # fmt: skip
        packs = self.packs and quantize
        matrices = [self._matrix(each, transposed, quantize, dtype, packs) for each in wanted]
        biases = [self.tensor(f"{each.name}.bias", (each.out_features,), each.cut()) for each in wanted if bias]
        make = host_weight if packs else weight_of
        weight = make(matrices, torch.cat(biases) if biases else None, order)
        self.quantized += quantized_in(weight)
        self.kinds.update(kinds_of(weight))
        return weight

    def _matrix(
        self,
        wanted: MatrixSlice,
        transposed: bool = False,
        quantize: bool = True,
        dtype: torch.dtype | None = None,
        packs: bool = False,
    ) -> Matrix:
        """The one place where a matrix gets its format. `packs`: it will be packed, from whatever it is."""
        matrix = self._stored_matrix(wanted, transposed, quantize, dtype)
        if isinstance(matrix, torch.Tensor) or not self.dequantizes or packs:
            return matrix
        self.kinds[f"{matrix.kind}: dequantized on load"] += 1
        return matrix.dense(dtype or self.dtype)

    def _stored_matrix(
        self, wanted: MatrixSlice, transposed: bool, quantize: bool, dtype: torch.dtype | None
    ) -> Matrix:
        """As the checkpoint has it, or quantized."""
        reader, quantizer = self._method.reader, self._method.quantizer_of(wanted) if quantize else None
        if reader is not None and reader.has(wanted.name, self):
            return reader.read(wanted, self)
        columns = wanted.columns
        if columns is not None and quantizer is not None and not between_groups(columns, quantizer.group_size):
            columns = None  # codes depend on all columns of a group
        cut, shape = wanted.cut(), (wanted.out_features, wanted.in_features)
        if columns is not None:
            cut[1] = [columns]
        if transposed:
            cut, shape = {1 - dim: ranges for dim, ranges in cut.items()}, (shape[1], shape[0])
        name = f"{wanted.name}.weight"
        matrix = self.tensor(name, shape, cut, dtype)
        if transposed:
            matrix = matrix.t().contiguous()
        if quantizer is None:
            return matrix
        quantized = quantizer(matrix)
        self._forget(name)
        return quantized if columns == wanted.columns else wanted.of_columns(quantized)

    def matrix(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        rows: Ranges | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Matrix:
        """Some outputs and inputs of a matrix, in the format that it has."""
        return self._matrix(MatrixSlice(name, out_features, in_features, rows, columns))

    def has_matrix(self, name: str) -> bool:
        """Dense or quantized."""
        return f"{name}.weight" in self or self._is_quantized(name)

    def _quantized_head(self, name: str, vocab_size: int, hidden_size: int) -> torch.Tensor:
        """Dense: logits are where rounding costs most."""
        first, last = self.shard.padded_span(vocab_size)
        inside = (min(first, vocab_size), min(last, vocab_size))
        matrix = self._matrix(MatrixSlice(name, vocab_size, hidden_size, [inside]))
        rows = matrix.dense(self.dtype) if isinstance(matrix, QuantizedMatrix) else matrix
        return F.pad(rows, (0, 0, 0, last - first - rows.shape[0]))

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


def _as_list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
