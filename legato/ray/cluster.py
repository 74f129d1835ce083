"""The application in Ray Serve: connects to a cluster or starts one, deploys, watches, removes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from legato.balancer.discovery import RAY_NAMESPACE, import_ray
from legato.balancer.replicas import ReplicaSet
from legato.common.errors import LegatoError, OptionError
from legato.ray.directory import open_directory
from legato.ray.options import RayOptions
from legato.ray.server import EXIT_SECONDS, ServerReplica

logger = logging.getLogger(__name__)

DEPLOYMENT = "server"
WATCH_SECONDS = 2.0
HEALTH_SECONDS = 2.0
# A server that cannot start does not start the fourth time either.
MAX_STARTS = 3
# Nothing of ours is in Ray's object store, which by default takes a third of the memory.
OBJECT_STORE_BYTES = 100 << 20
# Of Ray that is started here.
LOCAL_SETTINGS = {
    # Its processes listen on 127.0.0.1, as they do on these systems by default.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds between two messages of a replica to Serve's autoscaler; 10 by default.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


class DeploymentFailed(LegatoError):
    pass


class RayCluster:
    def __init__(self, options: RayOptions) -> None:
        self._options = options
        if options.ray_address is None:  # before Ray is imported
            for name, value in LOCAL_SETTINGS.items():
                os.environ.setdefault(name, value)
        self._ray: Any = import_ray("legato ray")
        self._is_ours = False

    def connect(self) -> None:
        ray, address = self._ray, self._options.ray_address
        common = {"namespace": RAY_NAMESPACE, "configure_logging": False}
        if address is None:
            self._start(common)
        else:
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError) as error:
                raise OptionError(f"--ray-address {address}: {error}") from None
        logger.info("Ray", extra={"fields": {"started": self._is_ours, **_totals(ray)}})

    def _start(self, common: Mapping[str, Any]) -> None:
        """On this machine, which nobody else can reach; it ends with this process."""
        self._is_ours = True
        self._ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **common,
        )

    def deploy(self, words: Sequence[str], environment: Mapping[str, str], route_key: str) -> None:
        serve, options = self._ray.serve, self._options
        open_directory(self._ray, options.name)
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(ServerReplica, name=DEPLOYMENT).options(**self._settings())
        grace = float(options.graceful_termination_timeout)
        application = deployment.bind(options.name, list(words), dict(environment), route_key, grace)
        target = serve.RunTarget(target=application, name=options.name, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _settings(self) -> dict[str, Any]:
        options, (low, high) = self._options, self._options.bounds
        settings: dict[str, Any] = {
            "placement_group_bundles": [self._bundle()],
            "placement_group_strategy": "STRICT_PACK",
            "ray_actor_options": _actor_options(self._bundle()),
            "health_check_period_s": HEALTH_SECONDS,
            "graceful_shutdown_timeout_s": options.graceful_termination_timeout + 2 * EXIT_SECONDS,
            "max_constructor_retry_count": MAX_STARTS,
        }
        if low == high:
            return {**settings, "num_replicas": low}
        policy = {
            "policy_function": "legato.ray.scaling:QueueAndUsePolicy",
            "policy_kwargs": {"target_queue": options.target_queue, "target_use": options.target_use},
        }
        scaling = {
            "min_replicas": low,
            "max_replicas": high,
            "initial_replicas": low,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 5.0,
            "upscale_delay_s": options.scale_up_delay,
            "downscale_delay_s": options.scale_down_delay,
            "policy": policy,
        }
        return {**settings, "autoscaling_config": scaling}

    def _bundle(self) -> dict[str, float]:
        """What one replica takes of one machine."""
        options, totals = self._options, _totals(self._ray)
        if totals["gpus"]:
            gpus = options.tensor_parallel
            return {"CPU": options.cpus_per_replica or gpus, "GPU": gpus}
        share = max(1, totals["cpus"] // options.bounds[1])
        return {"CPU": options.cpus_per_replica or share}

    async def watch(self, replicas: ReplicaSet) -> None:
        """For ever. DeploymentFailed if Ray gives up."""
        del replicas  # known by the directory
        last = ""
        while True:
            found = await asyncio.to_thread(self._status)
            if found is not None:
                state, message, counts = found
                if state == "DEPLOY_FAILED":
                    raise DeploymentFailed(f"Ray could not start a replica: {message.strip().splitlines()[-1]}")
                if counts != last:
                    logger.info("Replicas in Ray", extra={"fields": {"state": state, "replicas": counts}})
                last = counts
            await asyncio.sleep(WATCH_SECONDS)

    def _status(self) -> tuple[str, str, str] | None:
        """State of the application, what Ray says to it, and its replicas by state. None before Ray knows it."""
        application = self._ray.serve.status().applications.get(self._options.name)
        if application is None or DEPLOYMENT not in application.deployments:
            return None
        server = application.deployments[DEPLOYMENT]
        counts = ", ".join(f"{getattr(state, 'value', state)} {num}" for state, num in server.replica_states.items())
        return application.status.value, f"{application.message} {server.message}", counts

    def remove(self) -> None:
        """Lets requests finish. A cluster that we started ends."""
        ray, name = self._ray, self._options.name
        try:
            ray.serve.delete(name)
            ray.kill(open_directory(ray, name))
        except Exception as error:  # Ray's are many; it is gone, and with it what there was to remove
            logger.warning("The application %s may not be removed from Ray: %s", name, error)
        ray.shutdown()


def _totals(ray: Any) -> dict[str, float]:
    resources = ray.cluster_resources()
    return {"cpus": resources.get("CPU", 0.0), "gpus": resources.get("GPU", 0.0)}


def _actor_options(bundle: Mapping[str, float]) -> dict[str, float]:
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
