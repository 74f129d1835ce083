"""How a shard that has links finds its place: network, process group of its stage, and neighbours in the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.cluster.layout import RankLayout
from legato.cluster.links import TensorLink
from legato.cluster.network import ShardPlace
from legato.common.errors import OptionError
from legato.common.exits import exit_now
from legato.common.options import ServerOptions
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.server.nodes.collectives import LinkCollectives
from legato.server.nodes.place import open_network, place_of
from legato.server.nodes.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class ShardLinks:
    """The links of a shard, all of them up."""

    place: ShardPlace
    links: dict[int, TensorLink]

    @property
    def layout(self) -> RankLayout:
        return self.place.layout

    def shard(self, device: torch.device) -> Shard:
        """This rank within its stage, with collectives over links if the stage is on several machines."""
        layout, rank = self.layout, self.place.rank
        collectives = None
        if not layout.is_within_node(rank):
            if device.type != "cpu":
                raise OptionError(
                    f"the shards of a stage are on different machines: on GPUs use --pipeline-parallel-size"
                    f" {layout.num_nodes}, or a multiple of it, so that tensor parallelism stays within a machine"
                )
            collectives = LinkCollectives(rank, layout.tensor_ranks(rank), self.links)
        return Shard(
            layout.tensor_rank(rank), layout.tensor_size, collectives=collectives,
            stage=layout.stage(rank), num_stages=layout.num_stages, num_local=layout.num_local,
        )  # fmt: skip

    def pipeline(
        self, shard: Shard, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> PipelineStage | None:
        if shard.num_stages == 1:
            return None
        before, behind = (self.links[self.layout.neighbour(self.place.rank, by)] for by in (-1, 1))
        return PipelineStage(shard, before, behind, hidden_size, dtype, device, end_process)


def join_links(options: ServerOptions, files: ModelFiles, socket_path: str) -> ShardLinks | None:
    """Listen, and wait for the links to all peers. None if the shards are on one machine, in one stage."""
    place = place_of(options)
    if place is None:
        return None
    network = open_network(place, options, files, socket_path)
    return ShardLinks(place, network.link(end_process))


def end_process(reason: str) -> None:
    """A shard that has lost another never works again: the launchers start all of them anew."""
    exit_now(reason)
