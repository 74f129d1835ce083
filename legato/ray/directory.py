"""The directory of replicas, a Ray actor: replicas register once a second, balancers query it.

An entry that is not announced again for a while is dropped: its replica is dead, or cut off. An actor that Ray started
anew knows everybody again after a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from legato.balancer.discovery import RAY_NAMESPACE

ANNOUNCE_SECONDS = 1.0
# Without an announcement for so long, a replica is dropped. Its streams may still be finished by then.
EXPIRY_SECONDS = 10.0


class ReplicaDirectory:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # URL -> when it was last announced.
        self._announced: dict[str, float] = {}

    def announce(self, url: str) -> None:
        self._announced[url] = self._clock()

    def withdraw(self, url: str) -> None:
        self._announced.pop(url, None)

    def urls(self) -> list[str]:
        """In the order in which they came."""
        limit = self._clock() - EXPIRY_SECONDS
        self._announced = {url: at for url, at in self._announced.items() if at > limit}
        return list(self._announced)


def open_directory(ray: Any, name: str) -> Any:
    """The actor of this application; made where there is none."""
    actor = ray.remote(ReplicaDirectory)
    return actor.options(
        name=name, namespace=RAY_NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1
    ).remote()
