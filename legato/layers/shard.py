"""The rank of this process in the tensor-parallel group, and the collectives of the group.

Tensor parallelism, in three rules. A column-parallel product gives each shard some of the outputs; a row-parallel one
takes some of the inputs, so that the sum over all shards is the product; vocabularies are cut into equal rows. Between
a column-parallel and a row-parallel product every shard works alone: whole heads, or whole neurons of an MLP.

All shards run the same steps in the same order, so each of these calls meets its like on every other shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist

from legato.common.errors import TooManyShards, UnsupportedModel

# torch 2.13 gave it another name.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(Protocol):
    """Of shards on several machines, in place of torch's."""

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[m, c] of each shard -> [world_size m, c]"""
        ...

    def least(self, value: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank and size of the group. Default: a group of one. In a pipeline the group is that of one stage."""

    rank: int = 0
    world_size: int = 1
    collectives: Collectives | None = None  # None: those of torch's default group
    stage: int = 0
    num_stages: int = 1
    num_local: int = 0  # shards of all stages on this machine; 0: those of the group

    @property
    def is_alone(self) -> bool:
        """Whether this shard is the whole model: then it need not stay in sync with others."""
        return self.world_size == 1 and self.num_stages == 1

    @property
    def num_on_machine(self) -> int:
        return self.num_local or self.world_size

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        return range(num_layers * self.stage // self.num_stages, num_layers * (self.stage + 1) // self.num_stages)

    def span(self, size: int) -> tuple[int, int]:
        """The range [first, last) of `size` items on this rank. Sizes need not be divisible: ranges differ by one."""
        return size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size

    def padded_span(self, size: int) -> tuple[int, int]:
        """The range on this rank if all ranges must have the same size; the last ones are padded beyond `size`."""
        each = -(-size // self.world_size)
        return each * self.rank, each * (self.rank + 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce, in place; bit-identical on all ranks."""
        if self.collectives is not None:
            self.collectives.all_reduce(x)
        elif self.world_size > 1:
            dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[m, c] of each shard -> [m, world_size c] on all of them."""
        if self.world_size == 1:
            return x
        if self.collectives is not None:
            parts = self.collectives.gather(x)
        else:
            parts = torch.empty((self.world_size * x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
            gather_into(parts, x.contiguous())
        return parts.view(self.world_size, *x.shape).transpose(0, 1).flatten(1)

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of the shards' values, for what they must agree on."""
        if self.world_size == 1:
            return value
        if self.collectives is not None:
            return self.collectives.least(value)
        agreed = torch.tensor(value, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return cast(int, agreed.item())

    def heads(self, num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> Heads:
        """The heads of this shard. Key heads stay with the query heads that read them; if there are fewer key heads
        than shards, several shards hold the same one and divide its query heads."""
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
        if num_heads < self.world_size:
            raise TooManyShards(
                f"the model has {num_heads} attention heads, too few for {self.world_size} shards; lower --num-shard"
            )
        group = num_heads // num_kv_heads
        if num_kv_heads >= self.world_size:
            first_kv, last_kv = self.span(num_kv_heads)
            first, last = first_kv * group, last_kv * group
        else:
            first_kv = self.rank * num_kv_heads // self.world_size
            last_kv = first_kv + 1
            mates = [rank for rank in range(self.world_size) if rank * num_kv_heads // self.world_size == first_kv]
            among = Shard(mates.index(self.rank), len(mates))
            first, last = (first_kv * group + head for head in among.span(group))
        return Heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim, first, last, first_kv, last_kv)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer, and the range of them on this shard."""

    all_heads: int
    all_kv_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int  # of values; at most head_dim
    first: int  # query heads [first, last)
    last: int
    first_kv: int
    last_kv: int

    @property
    def num_heads(self) -> int:
        """Query heads of this shard."""
        return self.last - self.first

    @property
    def num_kv_heads(self) -> int:
        return self.last_kv - self.first_kv
