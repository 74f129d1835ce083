"""The options of a model on several machines."""

from __future__ import annotations

from dataclasses import dataclass

from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions(Options):
    """Several shards and machines"""

    master_addr: str = option(
        "localhost",
        "Address of machine 0, where the shards rendezvous. It listens on this address only.",
    )
    master_port: int = option(
        29500,
        "Rendezvous port of machine 0. With several machines or pipeline stages, the shard of rank R listens on this"
        " port + 1 + R. Without either, several shards use any free port unless it is given.",
        maximum=65535,
    )
    nnodes: int = option(
        1,
        "Number of machines that run the model together, each with `--num-shard` shards. Run the same command on"
        " every machine, each with its own `--node-rank`. Default: LWS_GROUP_SIZE, or torchrun's WORLD_SIZE, or 1.",
        minimum=1,
        env=None,
    )
    pipeline_parallel_size: int = option(
        1,
        "Number of pipeline stages that the layers are divided into. The shards of a stage use tensor parallelism;"
        " with as many stages as machines, each stage is within one machine.",
        minimum=1,
    )
    cluster_key: str | None = option(
        None,
        "Secret shared by the machines, at least 16 characters; required with `--nnodes`. Connections are"
        " authenticated with it before anything else is read from them.",
        secret=True,
    )
    cluster_certfile: str | None = option(
        None,
        "Certificate file of this machine, in PEM format. Connections between machines then use mutual TLS 1.3; set"
        " it on all machines or on none. Default: connections are authenticated but not encrypted.",
    )
    cluster_keyfile: str | None = option(
        None, "Private key file of `--cluster-certfile`, in PEM format, not encrypted."
    )
    cluster_cafile: str | None = option(
        None,
        "CA certificate file, in PEM format. The CA must have signed the certificates of all machines of this"
        " cluster, and no others.",
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """This machine"""

    node_rank: int = option(
        0,
        "Rank of this machine, from 0. Machine 0 serves HTTP. Default: LWS_WORKER_INDEX, or torchrun's RANK, or 0.",
        env=None,
    )
    node_addr: str | None = option(
        None,
        "Address that the shards of this machine listen on. Default: the address from which it reaches"
        " `--master-addr`.",
    )
    cluster_key_file: str | None = option(
        None, "File with the shared secret of the machines, instead of `--cluster-key`."
    )


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    """Other shards"""

    node_addrs: tuple[str, ...] = option(
        (), "Addresses of all machines, in their order; the launcher sets them.", env=None
    )
    group_id: str = option("", "Name of this start of the shards; the launcher sets it.", env=None)
