"""The options of a model on several machines."""

from __future__ import annotations

from dataclasses import dataclass

from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions(Options):
    """Several shards and machines"""

    master_addr: str = option(
        "localhost",
        "Address of the first machine, at which the shards find each other. It listens on this address only.",
    )
    master_port: int = option(
        29500,
        "Port of the first machine at which the shards find each other. With several machines or pipeline stages, shard"
        " R listens on the R + 1st port behind it.",
        maximum=65535,
    )
    nnodes: int = option(
        1,
        "Machines that run the model together, each with `--num-shard` shards. All of them are started with the same"
        " command and their own `--node-rank`. Default: LWS_GROUP_SIZE, or torchrun's WORLD_SIZE, or 1.",
        minimum=1,
        env=None,
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the layers are divided into. The shards of a stage share its products (tensor parallelism); with"
        " as many stages as machines each stage is within one machine.",
        minimum=1,
    )
    cluster_key: str | None = option(
        None,
        "Shared secret of the machines, at least 16 characters; required with `--nnodes`. Nothing is read from a"
        " connection that does not prove that it knows it.",
        secret=True,
    )
    cluster_certfile: str | None = option(
        None,
        "File with the certificate of this machine, PEM: connections between machines use TLS 1.3, and both ends show a"
        " certificate. On all machines or on none.",
    )
    cluster_keyfile: str | None = option(None, "File with the private key of `--cluster-certfile`, PEM, unencrypted.")
    cluster_cafile: str | None = option(
        None, "File with the authority that signed the certificates of all machines, PEM; of no others."
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """This machine"""

    node_rank: int = option(
        0,
        "Number of this machine, from 0. Machine 0 serves HTTP. Default: LWS_WORKER_INDEX, or torchrun's RANK, or 0.",
        env=None,
    )
    node_addr: str | None = option(
        None,
        "Address of this machine that its shards listen on. Default: the one from which it reaches `--master-addr`.",
    )
    cluster_key_file: str | None = option(None, "File with the shared secret of the machines, instead of the secret.")


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    """Other shards"""

    node_addrs: tuple[str, ...] = option(
        (), "Addresses of all machines, in their order; the launcher sets them.", env=None
    )
    group_id: str = option("", "Name of this start of the shards; the launcher sets it.", env=None)
