"""One replica: a launcher with its processes, as a child of an actor that Ray Serve places, checks and replaces.

Requests do not go through the actor: balancers talk to the launcher's port. When Ray stops the actor in order, the
launcher drains; when the actor is killed, the kernel kills the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from legato.balancer.discovery import import_ray
from legato.balancer.replicas import ReplicaUrl
from legato.common.options import LauncherOptions
from legato.common.program import variables
from legato.common.sockets import free_port
from legato.ipc.routed import KEY_HEADER, STATE_PATH, ReplicaState
from legato.launcher.processes import die_with
from legato.ray.directory import ANNOUNCE_SECONDS, open_directory
from legato.ray.scaling import measured

READY_INTERVAL = 0.25
# Seconds for the server to say how it is, and for its processes to exit after they drained.
STATE_SECONDS, EXIT_SECONDS = 5.0, 10.0

_decoder = msgspec.json.Decoder(ReplicaState)


class ServerEnded(Exception):
    """The launcher is gone; Ray replaces the replica."""


class ServerProcess:
    """The launcher."""

    def __init__(self, host: str, words: Sequence[str], environment: Mapping[str, str], route_key: str) -> None:
        self.url = ReplicaUrl(host, free_port(host))
        self._key = route_key
        # Several replicas may share a machine: no port may be a fixed one.
        ports = [f"--port={self.url.port}", f"--master-port={free_port(host)}", "--prometheus-port=0"]
        command = [sys.executable, "-m", "legato.launcher.cli", *words, f"--hostname={host}", *ports]
        known = variables(LauncherOptions)
        own = {name: value for name, value in os.environ.items() if name not in known}
        env = {**own, **environment, "ROUTE_KEY": route_key}
        self._child = subprocess.Popen(command, env=env, preexec_fn=die_with(os.getpid()))

    def raise_if_ended(self) -> None:
        code = self._child.poll()
        if code is not None:
            raise ServerEnded(f"the server at {self.url} ended with code {code}; its log says why")

    def state(self) -> ReplicaState:
        """OSError if it does not answer."""
        request = urllib.request.Request(f"{self.url}{STATE_PATH}", headers={KEY_HEADER: self._key})
        try:
            with urllib.request.urlopen(request, timeout=STATE_SECONDS) as answer:
                return _decoder.decode(answer.read())
        except (msgspec.DecodeError, http.client.HTTPException) as error:  # a worker may die while it answers
            raise OSError(f"{self.url}{STATE_PATH}: {error}") from None

    async def until_ready(self) -> ReplicaState:
        while True:
            self.raise_if_ended()
            with contextlib.suppress(OSError):
                state = await asyncio.to_thread(self.state)
                if state.ready:
                    return state
            await asyncio.sleep(READY_INTERVAL)

    async def stop(self, grace: float) -> None:
        """Lets requests finish for `grace` seconds."""
        deadline = time.monotonic() + grace + EXIT_SECONDS
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        while self._child.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(READY_INTERVAL)
        self._child.kill()  # nothing if it has ended


class ServerReplica:
    """What Ray Serve has several of. It is called by Serve only, never by clients."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, name: str, words: Sequence[str], environment: Mapping[str, str], route_key: str, grace: float
    ) -> None:
        ray = import_ray("legato ray")
        self._grace = grace
        self._directory = open_directory(ray, name)
        self._server = ServerProcess(_own_address(ray), words, environment, route_key)
        self._state = await self._server.until_ready()
        self._announcements = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        while True:
            self._directory.announce.remote(str(self._server.url))
            await asyncio.sleep(ANNOUNCE_SECONDS)
            with contextlib.suppress(OSError):  # its processes are being replaced
                self._state = await asyncio.to_thread(self._server.state)

    def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        self._server.raise_if_ended()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return measured(self._state)

    async def __del__(self) -> None:
        """Serve awaits it before it ends the actor."""
        await self._server.stop(self._grace)
        self._announcements.cancel()
        await self._directory.withdraw.remote(str(self._server.url))


def _own_address(ray: Any) -> str:
    """At which Ray reaches this machine: loopback if the cluster is this machine alone."""
    own = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own))
