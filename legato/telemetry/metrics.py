"""Prometheus metrics: TGI's names, labels and buckets, so that its dashboards keep working; ours begin with legato_.

Recorded per request and per step, never per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.samples import Sample

from legato.scheduling.state import ModelLimits

# What a process has counted: metric -> sample as it is written -> number. Zeros are left out.
Figures: TypeAlias = dict[str, dict[str, float]]
Method = Literal["prefill", "decode"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DURATION_BUCKETS = tuple(0.0001 * 1.5**n for n in range(1, 36))
BATCH_SIZE_BUCKETS = tuple(float(size) for size in range(1, 1025))


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds."""

    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    to_first_token: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step, from the scheduler. Times in seconds."""

    # "prefill" if any prompt token was computed.
    method: Method
    # Rows computed, and how many requests entered one for it.
    batch_size: int
    num_admitted: int
    # From sending the step to having its tokens; on the device; handing the tokens out; deciding what to compute.
    inference_time: float
    forward_time: float
    delivery_time: float
    planning_time: float
    # Tokens that the running requests hold or may still come to.
    max_tokens: int
    # Of the admitted prompts: all tokens, and those that were in the cache.
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preempted: int
    kv_usage: float
    failed: bool = False


class SchedulerLoad(Protocol):
    """What a scheduler can tell at any time."""

    @property
    def queue_size(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def running(self) -> int:
        """Requests running."""
        ...


class Metrics:
    def __init__(self, limits: ModelLimits) -> None:
        self.registry = CollectorRegistry()
        self._define_requests(limits)
        self._define_steps(limits)

    def watch(self, load: SchedulerLoad) -> None:
        """Gauges that are read at every scrape."""
        self._queue_size.set_function(lambda: load.queue_size)
        self._current_size.set_function(lambda: load.running)

    # ---- requests -------------------------------------------------------------------------------------------------

    def request_arrived(self) -> None:
        self._requests.inc()

    def request_validated(self, input_len: int, max_new_tokens: int) -> None:
        self._input_length.observe(input_len)
        self._max_new_tokens.observe(max_new_tokens)

    def request_failed(self, reason: str) -> None:
        """`validation`, `overloaded`, `generation`, `internal`, or `dropped` when the client hung up."""
        self._failures.labels(reason).inc()

    def request_succeeded(self, timings: Timings, num_tokens: int) -> None:
        self._successes.inc()
        self._duration.observe(timings.total)
        self._validation.observe(timings.validation)
        self._queue.observe(timings.queue)
        self._inference.observe(timings.inference)
        self._per_token.observe(timings.per_token)
        self._first_token.observe(timings.to_first_token)
        self._generated_tokens.observe(num_tokens)
        self._skipped_tokens.observe(0)  # every token has a step of its own

    # ---- steps ----------------------------------------------------------------------------------------------------

    def step(self, step: StepFigures) -> None:
        self._batches.labels(step.method).inc()
        if step.failed:
            self._batch_failures.labels(step.method).inc()
            return
        self._batch_successes.labels(step.method).inc()
        self._batch_inference.labels(step.method).observe(step.inference_time)
        self._batch_forward.labels(step.method).observe(step.forward_time)
        self._batch_decode.labels(step.method).observe(step.delivery_time)
        self._batch_filter.labels(step.method).observe(step.planning_time)
        if step.num_admitted:
            self._next_size.observe(step.num_admitted)
            self._prompt_tokens.inc(step.num_prompt_tokens)
            self._cached_tokens.inc(step.num_cached_tokens)
            if step.batch_size > step.num_admitted:
                self._concats.labels("chunking").inc()
                self._batch_concat.labels("decode").observe(step.planning_time)
        self._preemptions.inc(step.num_preempted)
        self._current_max_tokens.set(step.max_tokens)
        self._kv_usage.set(step.kv_usage)

    # ---- definitions ----------------------------------------------------------------------------------------------

    def _define_requests(self, limits: ModelLimits) -> None:
        self._requests = self._counter("tgi_request_count", "Requests received.")
        self._successes = self._counter("tgi_request_success", "Requests completed.")
        self._failures = self._counter("tgi_request_failure", "Requests failed, by reason.", "err")
        self._duration = self._seconds("tgi_request_duration", "Seconds from arrival to the end of the response.")
        self._validation = self._seconds("tgi_request_validation_duration", "Seconds of validation and tokenization.")
        self._queue = self._seconds("tgi_request_queue_duration", "Seconds in the queue.")
        self._inference = self._seconds("tgi_request_inference_duration", "Seconds from leaving the queue to the end.")
        self._per_token = self._seconds(
            "tgi_request_mean_time_per_token_duration", "Seconds of inference per generated token."
        )
        self._first_token = self._seconds("tgi_request_time_to_first_token", "Seconds from arrival to the first token.")
        self._input_length = self._histogram(
            "tgi_request_input_length", "Prompt tokens.", _steps(limits.max_input_tokens)
        )
        self._max_new_tokens = self._histogram(
            "tgi_request_max_new_tokens", "Requested max_new_tokens.", _steps(limits.max_total_tokens)
        )
        self._generated_tokens = self._histogram(
            "tgi_request_generated_tokens", "Tokens generated.", _steps(limits.max_total_tokens)
        )
        self._skipped_tokens = Summary(
            "tgi_request_skipped_tokens",
            "Tokens generated without a step of their own (speculation).",
            registry=self.registry,
        )
        self._queue_size = self._gauge("tgi_queue_size", "Requests in the queue.")

    def _define_steps(self, limits: ModelLimits) -> None:
        self._batches = self._counter("tgi_batch_inference_count", "Steps executed.", "method")
        self._batch_successes = self._counter("tgi_batch_inference_success", "Steps that succeeded.", "method")
        self._batch_failures = self._counter("tgi_batch_inference_failure", "Steps that failed.", "method")
        self._concats = self._counter("tgi_batch_concat", "Steps that admitted requests to a running batch.", "reason")
        self._batch_inference = self._seconds(
            "tgi_batch_inference_duration", "Seconds of a step, from sending it to receiving its tokens.", "method"
        )
        self._batch_forward = self._seconds("tgi_batch_forward_duration", "Seconds of a step on the device.", "method")
        self._batch_decode = self._seconds(
            "tgi_batch_decode_duration", "Seconds to deliver the tokens of a step.", "method"
        )
        self._batch_filter = self._seconds("tgi_batch_filter_duration", "Seconds to plan a step.", "method")
        self._batch_concat = self._seconds(
            "tgi_batch_concat_duration", "Seconds to plan a step that admits requests.", "method"
        )
        self._next_size = self._histogram("tgi_batch_next_size", "Requests admitted by a step.", BATCH_SIZE_BUCKETS)
        self._current_size = self._gauge("tgi_batch_current_size", "Requests running.")
        self._current_max_tokens = self._gauge(
            "tgi_batch_current_max_tokens", "Maximum tokens of the running requests."
        )
        max_total_tokens = self._gauge("tgi_batch_max_total_tokens", "Capacity of the KV cache in tokens.")
        max_total_tokens.set(limits.max_batch_total_tokens)
        self._kv_usage = self._gauge("legato_kv_usage", "Fraction of KV blocks used by running requests.")
        self._prompt_tokens = self._counter("legato_prompt_tokens", "Prompt tokens of admitted requests.")
        self._cached_tokens = self._counter("legato_prefix_hit_tokens", "Prompt tokens served from the prefix cache.")
        self._preemptions = self._counter(
            "legato_preemptions", "Preemptions: requests that released their blocks and were resumed later."
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(name, help, registry=self.registry)

    def _seconds(self, name: str, help: str, *labels: str) -> Histogram:
        return self._histogram(name, help, DURATION_BUCKETS, *labels)

    def _histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, help, labels, buckets=buckets, registry=self.registry)

    # ---- text -----------------------------------------------------------------------------------------------------

    def figures(self) -> Figures:
        """What adds up over processes: everything but gauges, which are the scheduler's own."""
        metrics = [metric for metric in self.registry.collect() if metric.type != "gauge"]
        return {metric.name: {name: value for name, value in _samples(metric.samples) if value} for metric in metrics}

    def render(self, others: Figures | None = None) -> bytes:
        """The text format, with what `others` have counted added to our own numbers. The library's own writer would
        call every counter `..._total`, which TGI's are not."""
        return "".join(self._lines(others or {})).encode()

    def _lines(self, others: Figures) -> Iterator[str]:
        for metric in self.registry.collect():
            yield f"# HELP {metric.name} {metric.documentation}\n# TYPE {metric.name} {metric.type}\n"
            added = dict(others.get(metric.name, {}))
            for name, value in _samples(metric.samples):
                yield f"{name} {value + added.pop(name, 0.0)!r}\n"
            for name, value in added.items():  # with labels that never came up here
                yield f"{name} {value!r}\n"


def add_up(all_figures: Iterable[Figures]) -> Figures:
    total: Figures = {}
    for figures in all_figures:
        for metric, samples in figures.items():
            sums = total.setdefault(metric, {})
            for name, value in samples.items():
                sums[name] = sums.get(name, 0.0) + value
    return total


def _samples(samples: Iterable[Sample]) -> Iterator[tuple[str, float]]:
    """Each as it is written, and its number."""
    for sample in samples:
        if sample.name.endswith("_created"):
            continue
        name = sample.name.removesuffix("_total")
        labels = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
        yield (f"{name}{{{labels}}}" if labels else name), float(sample.value)


def _steps(maximum: int) -> list[float]:
    """A hundred equal steps up to the maximum."""
    return [maximum / 100 * n for n in range(1, 101)]
