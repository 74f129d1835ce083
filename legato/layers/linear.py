"""Column- and row-parallel linear layers, the embedding and the LM head. `Weights` builds them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.layers.lora import LoraDelta
from legato.layers.shard import Shard
from legato.quantization.dense import DenseWeight, Weight
from legato.quantization.host import HostWeight


class Linear:
    """x [T, in] -> [T, out]: column parallel, or replicated."""

    lora: LoraDelta | None = None  # set if adapters can change it; so in the classes below

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self.weight.apply(x)
        return product if self.lora is None else self.lora.add(product, x)


class RowLinear:
    """x [T, our part of in] -> [T, out], summed over the shards.

    The sum can be left to the caller (`reduce=False`), who may have several of them to add first: experts, or the two
    branches of a parallel residual. The bias, if any, is in the first shard's weight only.
    """

    lora: LoraDelta | None = None

    def __init__(self, weight: Weight, shard: Shard, reduce: bool = True) -> None:
        self.weight = weight
        self.shard = shard
        self.reduces = reduce and shard.world_size > 1
        self._apply = weight.apply

    def leave_parts(self) -> None:
        """The result will be passed to `norm.add`, which also accepts split-K partial sums."""
        if isinstance(self.weight, DenseWeight) and not self.reduces:
            self._apply = self.weight.apply_in_parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._apply(x)
        if self.lora is not None:
            product = self.lora.add(product, x)
        return self.shard.all_reduce(product) if self.reduces else product


class Embedding:
    """Token ids [T] -> [T, hidden]. Each shard holds some rows of the table; ids of other shards give zero here."""

    lora: LoraDelta | None = None

    def __init__(self, weight: torch.Tensor, first: int, shard: Shard) -> None:
        self.weight = weight  # [rows of this shard, hidden], zeros beyond the vocabulary
        self.first = first
        self.shard = shard

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.shard.world_size == 1:
            found = F.embedding(ids, self.weight)
            return found if self.lora is None else self.lora.look_up(found, ids)
        ours = ids - self.first
        foreign = (ours < 0) | (ours >= self.weight.shape[0])
        ours = ours.masked_fill(foreign, 0)
        found = F.embedding(ours, self.weight).masked_fill_(foreign[:, None], 0)
        if self.lora is not None:
            found = self.lora.look_up(found, ours, foreign)
        return self.shard.all_reduce(found)


class AbsentEmbedding(Embedding):
    """Of a stage that embeds nothing; its table is read only if the head is the same."""

    def __init__(self, name: str, shard: Shard) -> None:
        self.name = name
        self.first = 0
        self.shard = shard


class PackedEmbedding(Embedding):
    """Rows of a packed matrix, expanded one by one: for a CPU and a shard that has the whole vocabulary."""

    def __init__(self, packed: HostWeight, shard: Shard) -> None:
        self.packed = packed
        self.first = 0
        self.shard = shard

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.packed.packed.rows(ids)
        return found if self.lora is None else self.lora.look_up(found, ids)


class Head:
    """[m, hidden] -> [m, vocab_size], gathered on every shard: all sample the same token."""

    lora: LoraDelta | None = None

    def __init__(self, weight: Weight, vocab_size: int, shard: Shard) -> None:
        self.weight = weight
        self.vocab_size = vocab_size
        self.shard = shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.weight.apply(x)
        if self.lora is not None:
            logits = self.lora.add(logits, x)
        if self.shard.world_size == 1:
            return logits
        return self.shard.gather_columns(logits)[:, : self.vocab_size].contiguous()


class AbsentHead(Head):
    """Of a stage that is not the last."""

    def __init__(self, vocab_size: int, shard: Shard) -> None:
        self.vocab_size = vocab_size
        self.shard = shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only the last stage computes logits")
