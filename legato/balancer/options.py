"""The options of `legato route`, and those that it shares with `legato ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato.balancer.discovery import Discovery, discovery_of
from legato.balancer.replicas import ReplicaUrl
from legato.common.errors import OptionError
from legato.common.frontend import check_route_key
from legato.common.option import Options, option


@dataclass(frozen=True, kw_only=True)
class BalancerOptions(Options):
    """Balancer"""

    policy: Literal["prefix", "least-load", "round-robin"] = option(
        "prefix",
        "How replicas are chosen: `prefix` by cached prefixes and load, `least-load` by load only, `round-robin` in"
        " turn.",
    )
    route_key: str | None = option(
        None,
        "Secret shared with the servers (their `--route-key`), at least 16 characters. With it, streams of a lost"
        " replica continue on another. Default: none, and such streams end with an error.",
        secret=True,
    )
    hostname: str = option("0.0.0.0", "IP address to listen on.")
    port: int = option(3000, "Port to listen on.", short="p", minimum=0, maximum=65535)
    ssl_certfile: str | None = option(
        None, "TLS certificate, with its chain, in PEM format. Default: client connections are not encrypted."
    )
    ssl_keyfile: str | None = option(
        None, "Private key of `--ssl-certfile`. Default: in the same file as the certificate."
    )
    replica_ca: str | None = option(
        None, "CA certificates for `https` replicas, in PEM format. Default: the system's CA certificates."
    )
    max_concurrent_requests: int | None = option(
        None, "Maximum requests in flight; more get 429. Default: the sum of the replicas' limits.", minimum=1
    )
    payload_limit: int = option(32 << 20, "Maximum size of a request body, in bytes.", minimum=1)
    probe_interval: float = option(1.0, "Time between two probes of a replica, in seconds.", minimum=0.05)
    probe_timeout: float = option(
        5.0,
        "Time for a replica to respond to a probe, in seconds; after that it counts as lost and its streams move"
        " to another.",
        minimum=0.1,
    )
    move_timeout: float = option(
        30.0, "Time to wait for another replica that can continue a request of a lost replica, in seconds.", minimum=0
    )
    graceful_termination_timeout: int = option(
        90, "Time for running requests to finish after a stop signal, in seconds.", short="g"
    )
    logger_level: str = option("info", "Log level: `error`, `warn`, `info`, `debug` or `trace`.", env="LOG_LEVEL")
    json_output: bool = option(False, "Write the log as one JSON object per line.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_route_key(self.route_key)


@dataclass(frozen=True, kw_only=True)
class RouteOptions(BalancerOptions):
    """Replicas"""

    replica: tuple[str, ...] = option(
        (), "URLs of the servers, such as `http://10.0.0.7:3000`, comma-separated or repeated.", env="REPLICAS"
    )
    discover: str | None = option(
        None,
        "Find replicas: `dns:NAME:PORT` uses every address of the DNS name, `ray:NAME` every replica of `legato ray"
        " --name NAME` on this Ray cluster. Refreshed every two seconds.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.replica) == bool(self.discover):
            raise OptionError("give either --replica, once for each server, or --discover dns:NAME:PORT or ray:NAME")
        for url in self.replica:
            ReplicaUrl.parse(url)
        if self.discover is not None:
            discovery_of(self.discover)

    @property
    def urls(self) -> list[ReplicaUrl]:
        return [ReplicaUrl.parse(url) for url in self.replica]

    @property
    def discovery(self) -> Discovery | None:
        return None if self.discover is None else discovery_of(self.discover)
