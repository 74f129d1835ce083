"""The rank of this machine, from flags or the variables of LeaderWorkerSet and torchrun."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from legato.cluster.layout import RankLayout
from legato.cluster.secret import read_key
from legato.cluster.tls import LinkTls
from legato.common.errors import OptionError
from legato.common.options import LauncherOptions


def placed(options: LauncherOptions, environ: Mapping[str, str]) -> LauncherOptions:
    """The options with rank, number of machines, their first one's address, and the key. OptionError."""
    if "nnodes" not in options.given:
        options = _from_lws(options, environ) or _from_torchrun(options, environ) or options
    if options.node_rank >= options.nnodes:
        raise OptionError(f"--node-rank ({options.node_rank}) must be less than --nnodes ({options.nnodes})")
    key = read_key(options.cluster_key, options.cluster_key_file)
    link_tls(options)  # or say now what is wrong with it
    if options.nnodes == 1 and "node_rank" in options.given:
        raise OptionError("--node-rank is for several machines: add --nnodes")
    if options.nnodes > 1:
        if key is None:
            raise OptionError(
                "--nnodes needs --cluster-key (or CLUSTER_KEY, or --cluster-key-file): a secret that all machines share"
            )
        if options.master_addr == "localhost":
            raise OptionError("--nnodes needs --master-addr: the address of machine 0 that the others can reach")
    elif options.pipeline_parallel_size > 1 and key is None:
        key = secrets.token_hex(32)
    return replace(options, cluster_key=key, cluster_key_file=None)


def link_tls(options: LauncherOptions) -> LinkTls | None:
    return LinkTls.of(options.cluster_certfile, options.cluster_keyfile, options.cluster_cafile)


def layout_of(options: LauncherOptions, num_local: int) -> RankLayout:
    layout = RankLayout(options.nnodes, num_local, options.pipeline_parallel_size)
    if layout.needs_links and options.master_port + 1 + layout.world_size > 65536:
        raise OptionError(
            f"--master-port ({options.master_port}) leaves no room for the ports of the shards, which follow it"
        )
    if layout.needs_links and options.task == "embed":
        raise OptionError("--task embed runs on one device: leave out --nnodes and --pipeline-parallel-size")
    if options.pipeline_parallel_size > 1:
        _check_pipeline(options)
    return layout


def _check_pipeline(options: LauncherOptions) -> None:
    """What no stage can do alone."""
    refused = {
        "--speculate": bool(options.speculate),
        "--speculate-model": options.speculate_model is not None,
        "--lora-adapters": bool(options.lora_adapters),
        "--lora-allow-runtime": options.lora_allow_runtime,
        "--fake": options.fake,
    }
    for flag, is_given in refused.items():
        if is_given:
            raise OptionError(f"{flag} cannot be combined with --pipeline-parallel-size")


def _from_lws(options: LauncherOptions, environ: Mapping[str, str]) -> LauncherOptions | None:
    """Kubernetes' LeaderWorkerSet: a group of pods, the leader of which has index 0."""
    if "LWS_GROUP_SIZE" not in environ:
        return None
    size, index = _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
    address = options.master_addr if "master_addr" in options.given else environ.get("LWS_LEADER_ADDRESS", "")
    return replace(options, nnodes=size, node_rank=index, master_addr=address or options.master_addr)


def _from_torchrun(options: LauncherOptions, environ: Mapping[str, str]) -> LauncherOptions | None:
    """One process of torchrun on each machine, or RANK and WORLD_SIZE as Kubeflow's PyTorchJob sets them. MASTER_ADDR
    and MASTER_PORT are variables of ours anyway."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    if _number(environ, "LOCAL_WORLD_SIZE", 1) != 1:
        raise OptionError(
            "start one launcher on each machine (torchrun --nproc-per-node 1): it starts the shards itself"
        )
    port = options.master_port
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens on the port that it names
    return replace(options, nnodes=_number(environ, "WORLD_SIZE"), node_rank=_number(environ, "RANK"), master_port=port)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise OptionError(f"{name} is {value!r}: it must be a number")
    return int(value)
