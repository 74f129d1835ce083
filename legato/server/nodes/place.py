"""Where a shard is among all of a model's, by its options. Without torch: fake shards are on several machines, too."""

from __future__ import annotations

from legato.cluster.identity import identity
from legato.cluster.layout import RankLayout
from legato.cluster.network import ShardNetwork, ShardPlace
from legato.cluster.tls import LinkTls
from legato.common.errors import OptionError
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles


def place_of(options: ServerOptions) -> ShardPlace | None:
    if options.world_size % options.nnodes:
        raise OptionError(f"--world-size ({options.world_size}) must be a multiple of --nnodes ({options.nnodes})")
    layout = RankLayout(options.nnodes, options.world_size // options.nnodes, options.pipeline_parallel_size)
    if not layout.needs_links:
        return None
    if len(options.node_addrs) != options.nnodes or not options.cluster_key or not options.group_id:
        raise OptionError(
            "--nnodes and --pipeline-parallel-size are for text-generation-launcher, which passes the addresses to"
            " the shards"
        )
    key = options.cluster_key.encode()
    tls = LinkTls.of(options.cluster_certfile, options.cluster_keyfile, options.cluster_cafile)
    return ShardPlace(layout, options.rank, options.node_addrs, options.master_port, options.group_id, key, tls)


def open_network(place: ShardPlace, options: ServerOptions, files: ModelFiles, socket_path: str) -> ShardNetwork:
    return ShardNetwork(place, identity(options, files.path), socket_path)
