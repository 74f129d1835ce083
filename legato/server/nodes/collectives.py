"""Collectives of tensor parallelism over links between machines, for CPUs.

Every rank sends its tensor to every other and adds all of them up in the order of the ranks, so that the sum has the
same bits everywhere. One exchange instead of the two of a ring: with few ranks the latency of the link counts most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from legato.cluster.links import TensorLink


class LinkCollectives:
    def __init__(self, rank: int, ranks: Sequence[int], links: Mapping[int, TensorLink]) -> None:
        """`ranks` are those of the group in order, this one among them."""
        self._rank = rank
        self._ranks = list(ranks)
        self._links = links

    def all_reduce(self, x: torch.Tensor) -> None:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[m, c] of each rank -> [ranks m, c]"""
        return torch.cat(self._exchange(x))

    def least(self, value: int) -> int:
        return min(int(part.item()) for part in self._exchange(torch.tensor([value])))

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order."""
        ours = x.contiguous()
        data = bytes_of(ours)
        others = [rank for rank in self._ranks if rank != self._rank]
        for rank in others:
            self._links[rank].send(data)
        found = {rank: tensor_of(self._links[rank].receive(len(data)), ours) for rank in others}
        return [ours if rank == self._rank else found[rank] for rank in self._ranks]


def bytes_of(x: torch.Tensor) -> memoryview:
    """Of a contiguous tensor on the host, without a copy."""
    return x.view(-1).view(torch.uint8).numpy().data


def tensor_of(data: bytearray, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape)
