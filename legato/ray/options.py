"""The options of `legato ray`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from legato.balancer.options import BalancerOptions
from legato.common.errors import OptionError
from legato.common.option import option


@dataclass(frozen=True, kw_only=True)
class RayOptions(BalancerOptions):
    """Ray"""

    model_id: str | None = option(None, "Model to serve, as for the launcher. Default: the launcher's default model.")
    replicas: str = option(
        "1:1", "Number of replicas: `MIN:MAX`, scaled by queue length and KV cache use, or a fixed number.", env=None
    )
    tensor_parallel: int = option(
        1, "Number of shards per replica (`--num-shard` of the launcher).", env=None, minimum=1
    )
    cpus_per_replica: float | None = option(
        None,
        "CPUs that Ray reserves per replica. Default: one per GPU; without GPUs, the cluster's CPUs divided by the"
        " maximum number of replicas.",
        env=None,
        minimum=0.1,
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster; `auto` means the cluster of this machine. Default: Ray is started on this"
        " machine and stopped when this command ends.",
    )
    name: str = option(
        "legato", "Name of the application in Ray, for `legato route --discover ray:NAME` on other machines.", env=None
    )
    target_queue: float = option(
        4.0,
        "Average number of queued requests per replica above which another replica is started.",
        env=None,
        minimum=0.1,
    )
    target_use: float = option(
        0.8,
        "Average fraction of the KV cache or of the rows in use per replica, 0 to 1, above which another replica is"
        " started.",
        env=None,
        minimum=0.01,
        maximum=1.0,
    )
    scale_up_delay: float = option(
        10.0, "Time for which another replica must be needed before it is started, in seconds.", env=None, minimum=0
    )
    scale_down_delay: float = option(
        600.0,
        "Time for which a replica must not be needed before it is stopped, in seconds. A new replica starts with an"
        " empty cache.",
        env=None,
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        found = re.fullmatch(r"(\d+)(?::(\d+))?", self.replicas)
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise OptionError(f"--replicas {self.replicas}: expected MIN:MAX with 1 <= MIN <= MAX, or one number")

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum of replicas."""
        low, _, high = self.replicas.partition(":")
        return int(low), int(high or low)
