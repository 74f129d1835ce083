"""`legato ray`: replicas on a Ray cluster, or on this machine, behind our balancer."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from legato.balancer.cli import prepare, run_balancer
from legato.balancer.discovery import RayDiscovery
from legato.common.errors import OptionError
from legato.common.options import LauncherOptions
from legato.common.program import command, run_program, variables
from legato.launcher.cli import COMMAND as LAUNCHER
from legato.ray.cluster import RayCluster
from legato.ray.options import RayOptions

# Of the Hub, which are no options.
TOKENS = ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT")
# Of the launcher: set for every replica, or options of this command.
OURS = {
    "model_id": "--model-id before it",
    "num_shard": "--tensor-parallel",
    "sharded": "--tensor-parallel",
    "route_key": "--route-key before it",
    "graceful_termination_timeout": "--graceful-termination-timeout before it",
    "hostname": "Ray, which chooses the machine",
    "port": "the machine: a free one",
    "master_port": "the machine: a free one",
    "master_addr": "Ray, which places a replica on one machine",
    "nnodes": "Ray, which places a replica on one machine",
    "node_rank": "Ray, which places a replica on one machine",
    "prometheus_port": "the machine: metrics are on the replica's own port",
    "shard_uds_path": "the machine: a new folder",
    "ssl_certfile": "nobody: --ssl-certfile before it encrypts the clients' side",
    "ssl_keyfile": "nobody: --ssl-keyfile before it is for the clients' side",
}


def run(options: RayOptions) -> None:
    prepare(options)
    route_key = options.route_key or secrets.token_hex(24)
    options = replace(options, route_key=route_key)
    words = click.get_current_context().params["launcher_args"]
    check_launcher(words)
    cluster = RayCluster(options)
    cluster.connect()
    try:
        cluster.deploy(launcher_words(options, words), launcher_environment(), route_key)
        run_balancer(options, (), RayDiscovery(f"ray:{options.name}").run, cluster.watch)
    finally:
        cluster.remove()


def check_launcher(words: Sequence[str]) -> None:
    """Finds mistakes in the launcher's arguments before anything is started."""
    context = LAUNCHER.make_context("text-generation-launcher", list(words))
    for name, instead in OURS.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise OptionError(f"--{name.replace('_', '-')} after -- : replicas get it from {instead}")


def launcher_environment() -> dict[str, str]:
    """The launcher's variables that are set here, which on a cluster the machines of replicas do not have."""
    ours = {name.upper() for name in OURS}
    return {name: os.environ[name] for name in {*variables(LauncherOptions), *TOKENS} - ours if name in os.environ}


def launcher_words(options: RayOptions, words: Sequence[str]) -> list[str]:
    model = [f"--model-id={options.model_id}"] if options.model_id else []
    grace = f"--graceful-termination-timeout={options.graceful_termination_timeout}"
    return [*model, f"--num-shard={options.tensor_parallel}", grace, *words]


COMMAND = command(
    RayOptions,
    run,
    "ray",
    "Replicas on a Ray cluster, or on this machine, behind one endpoint. Arguments after -- are the launcher's.",
)
COMMAND.params.append(click.Argument(["launcher_args"], nargs=-1, type=click.UNPROCESSED))


def main(args: list[str] | None = None) -> Any:
    sys.exit(run_program(COMMAND, args))


if __name__ == "__main__":
    main()
