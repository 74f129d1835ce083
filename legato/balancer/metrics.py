"""The balancer's metrics, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from legato.balancer.replicas import ReplicaSet
from legato.balancer.selection import Selection
from legato.telemetry.route_catalogue import OUTCOMES, ROUTE
from legato.telemetry.values import Counter, Histogram, label_text

OUTCOME_OF_CLASS = {2: "answered", 4: "refused", 5: "failed"}


class RouteMetrics:
    def __init__(self, replicas: ReplicaSet, selection: Selection) -> None:
        self._replicas = replicas
        self._selection = selection
        self._requests = Counter({"outcome": OUTCOMES})
        self._counts = dict.fromkeys(("retries", "moves", "losses"), 0)
        duration = ROUTE["legato_route_duration_seconds"]
        self._duration = Histogram({}, duration.fixed_bounds)

    def ended(self, status: int, seconds: float) -> None:
        """`status` 0: the client hung up."""
        self._requests.inc(OUTCOME_OF_CLASS.get(status // 100, "answered") if status else "dropped")
        self._duration.observe(seconds)

    def retried(self) -> None:
        self._counts["retries"] += 1

    def moved(self) -> None:
        """A stream goes on at another replica."""
        self._counts["moves"] += 1

    def lost(self) -> None:
        self._counts["losses"] += 1

    def render(self, now: float) -> bytes:
        return "".join(self._lines(now)).encode()

    def _lines(self, now: float) -> Iterator[str]:
        samples = dict(self._samples(now))
        for metric in ROUTE.values():
            yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
            for sample, value in samples[metric.name]:
                yield f"{sample} {value!r}\n"

    def _samples(self, now: float) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        replicas, selection = self._replicas.all, self._selection

        def one(name: str, value: float) -> tuple[str, list[tuple[str, float]]]:
            return name, [(name, float(value))]

        yield "legato_route_requests", list(self._requests.samples("legato_route_requests"))
        yield "legato_route_duration_seconds", list(self._duration.samples("legato_route_duration_seconds"))
        for name, value in self._counts.items():
            yield one(f"legato_route_{name}", value)
        yield one("legato_route_prompt_tokens", selection.num_prompt_tokens)
        yield one("legato_route_matched_tokens", selection.num_matched_tokens)
        yield one("legato_route_replicas", len(replicas))
        yield one("legato_route_replicas_available", len(self._replicas.available(now)))
        per_replica = {
            "legato_route_replica_requests": [replica.num_requests for replica in replicas],
            "legato_route_replica_active": [replica.num_active for replica in replicas],
            "legato_route_replica_losses": [replica.num_losses for replica in replicas],
        }
        labels = [label_text([("replica", str(replica.url))]) for replica in replicas]
        for name, values in per_replica.items():
            yield name, [(name + label, float(value)) for label, value in zip(labels, values, strict=True)]
