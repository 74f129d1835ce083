"""Discovers replicas by polling DNS or Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from typing import Any

from legato.balancer.replicas import ReplicaSet, ReplicaUrl
from legato.common.errors import OptionError

logger = logging.getLogger(__name__)

# Seconds between two questions.
DISCOVER_SECONDS = 2.0
# Where Ray has the actor that knows the replicas of an application (`legato.ray.directory`).
RAY_NAMESPACE = "legato"
# Seconds for that actor to answer.
ACTOR_SECONDS = 5.0


class Discovery(ABC):
    def __init__(self, spec: str) -> None:
        self._spec = spec

    def connect(self) -> None:
        """Before the event loop runs. OptionError if there is nobody to ask."""
        return

    @abstractmethod
    async def resolve(self) -> list[ReplicaUrl]:
        """OSError if nobody answers."""

    async def run(self, replicas: ReplicaSet) -> None:
        """For ever. While nobody answers, replicas stay as they are."""
        failed = False
        while True:
            try:
                replicas.update(await self.resolve())
                failed = False
            except OSError as error:
                if not failed:
                    logger.warning("--discover %s failed: %s", self._spec, error)
                failed = True
            await asyncio.sleep(DISCOVER_SECONDS)


class DnsDiscovery(Discovery):
    """`dns:NAME:PORT`: every address of the name is a replica, as with a headless service of Kubernetes."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._name, _, port = spec.removeprefix("dns:").rpartition(":")
        if not self._name or not port.isdecimal() or not 0 < int(port) < 65536:
            raise OptionError(f"--discover {spec!r}: expected dns:NAME:PORT")
        self._port = int(port)

    async def resolve(self) -> list[ReplicaUrl]:
        """Sorted."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        return [ReplicaUrl(host, self._port) for host in sorted({str(address[0]) for *_, address in found})]


class RayDiscovery(Discovery):
    """`ray:NAME`: the replicas of an application that `legato ray --name NAME` runs."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._name = spec.removeprefix("ray:")
        if not self._name:
            raise OptionError(f"--discover {spec!r}: expected ray:NAME")

    def connect(self) -> None:
        ray = import_ray("--discover ray:NAME")
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "auto")
            try:
                ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError) as error:
                raise OptionError(f"--discover {self._spec}: no Ray cluster at {address}: {error}") from None

    async def resolve(self) -> list[ReplicaUrl]:
        ray = import_ray("--discover ray:NAME")
        try:
            directory = await asyncio.to_thread(ray.get_actor, self._name, namespace=RAY_NAMESPACE)
            async with asyncio.timeout(ACTOR_SECONDS):
                urls = await directory.urls.remote()
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            raise OSError(f"no directory of {self._name!r} in Ray: {error}") from None
        return [ReplicaUrl.parse(url) for url in urls]


def discovery_of(spec: str) -> Discovery:
    kind = spec.partition(":")[0]
    if kind == "dns":
        return DnsDiscovery(spec)
    if kind == "ray":
        return RayDiscovery(spec)
    raise OptionError(f"--discover {spec!r}: expected dns:NAME:PORT or ray:NAME")


def import_ray(what: str) -> Any:
    """Ray with Serve, which is no dependency of ours."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise OptionError(f"{what} needs Ray: pip install 'legato[ray]' ({error})") from None
    return ray
