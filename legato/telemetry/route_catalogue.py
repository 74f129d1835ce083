"""The metrics of the balancer (`legato route`), apart from those of a server: no process has both.

`catalogue.py` has the servers'. `docs/metrics.md` is made of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from legato.telemetry.catalogue import DURATION_BUCKETS

OUTCOMES = ("answered", "refused", "failed", "dropped")


@dataclass(frozen=True, slots=True)
class RouteMetric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    # As the page shows them; those of replicas are their URLs.
    labels: str = ""

    @property
    def fixed_bounds(self) -> Sequence[float]:
        return DURATION_BUCKETS


_URL = "`replica`: its URL"
_METRICS = (
    RouteMetric(
        "legato_route_requests",
        "counter",
        "Requests, by outcome; `dropped`: the client disconnected.",
        "`outcome`: " + ", ".join(f"`{outcome}`" for outcome in OUTCOMES),
    ),
    RouteMetric("legato_route_duration_seconds", "histogram", "Seconds from arrival to the end of the response."),
    RouteMetric(
        "legato_route_retries", "counter", "Requests sent to another replica because one refused them or was lost."
    ),
    RouteMetric(
        "legato_route_moves", "counter", "Streams that continued on another replica after tokens had been sent."
    ),
    RouteMetric("legato_route_losses", "counter", "Connections to replicas that broke during a request."),
    RouteMetric("legato_route_prompt_tokens", "counter", "Prompt tokens, estimated from bytes."),
    RouteMetric(
        "legato_route_matched_tokens",
        "counter",
        "Prompt tokens expected in the chosen replica's cache, estimated from bytes.",
    ),
    RouteMetric("legato_route_replicas", "gauge", "Known replicas."),
    RouteMetric("legato_route_replicas_available", "gauge", "Replicas that currently get requests."),
    RouteMetric("legato_route_replica_requests", "counter", "Requests sent to a replica.", _URL),
    RouteMetric("legato_route_replica_active", "gauge", "Requests in progress on a replica.", _URL),
    RouteMetric("legato_route_replica_losses", "counter", "Failed probes and broken connections of a replica.", _URL),
)
ROUTE = {metric.name: metric for metric in _METRICS}
