"""Which rank is on which machine, in which pipeline stage, and which ranks talk to each other.

Ranks are numbered machine by machine. A pipeline stage is a run of ranks, so that stages lie on machines one after the
other and, if there are as many stages as machines, tensor parallelism stays within each of them:

    2 machines of 2 shards        --pipeline-parallel-size 1       --pipeline-parallel-size 2
    machine 0: ranks 0 1          one group of four: 0 1 2 3       stage 0: 0 1
    machine 1: ranks 2 3                                           stage 1: 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

from legato.common.errors import OptionError


@dataclass(frozen=True, slots=True)
class RankLayout:
    num_nodes: int
    num_local: int  # shards of each machine
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_stages:
            raise OptionError(
                f"--pipeline-parallel-size ({self.num_stages}) must divide the number of shards, which is"
                f" {self.world_size}: --nnodes ({self.num_nodes}) times --num-shard ({self.num_local})"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_local

    @property
    def tensor_size(self) -> int:
        """Shards of a stage, which compute every product of its layers together."""
        return self.world_size // self.num_stages

    @property
    def needs_links(self) -> bool:
        return self.num_nodes > 1 or self.num_stages > 1

    def node(self, rank: int) -> int:
        return rank // self.num_local

    def ranks_of(self, node: int) -> range:
        return range(node * self.num_local, (node + 1) * self.num_local)

    def stage(self, rank: int) -> int:
        return rank // self.tensor_size

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor_size

    def tensor_ranks(self, rank: int) -> range:
        """All of its stage."""
        first = self.stage(rank) * self.tensor_size
        return range(first, first + self.tensor_size)

    def is_within_node(self, rank: int) -> bool:
        """Whether its stage is."""
        return len({self.node(each) for each in self.tensor_ranks(rank)}) == 1

    def neighbour(self, rank: int, by: int) -> int:
        """The rank with its part of the products `by` stages further on; behind the last stage comes the first."""
        return (rank + by * self.tensor_size) % self.world_size

    def peers(self, rank: int) -> list[int]:
        """The ranks that it has a link to."""
        found = {self.neighbour(rank, by) for by in (1, -1)} if self.num_stages > 1 else set()
        if not self.is_within_node(rank):
            found.update(self.tensor_ranks(rank))
        return sorted(found - {rank})


def link_port(master_port: int, rank: int) -> int:
    """Where a shard listens to the others; the launcher of the first machine listens on `master_port` itself."""
    return master_port + 1 + rank
