"""The metrics of all processes, and their Prometheus text format. `catalogue.py` describes each metric.

Recorded per request and per step, never per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from legato.scheduling.state import ModelLimits
from legato.telemetry.catalogue import ALL, FAILURES, Metric
from legato.telemetry.values import Counter, Gauge, Histogram, Value

# What a process has counted: metric -> sample as it is written -> number. Zeros are left out.
Figures: TypeAlias = dict[str, dict[str, float]]
Method = Literal["prefill", "decode"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    # From sending the step to having its tokens; in the shard: on the device, and beside it.
    inference_time: float
    forward_time: float
    decode_time: float
    # Booking the result, handing the tokens out and forgetting those who ended; deciding what to compute.
    filter_time: float
    planning_time: float
    # Tokens handed out; how many of them follow one of the step before, and after how long.
    num_tokens: int
    num_gaps: int
    gap: float
    # Tokens computed, prompts and decodes together.
    num_computed: int
    # Of the admitted prompts: all tokens, and those that were in the cache.
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preempted: int
    failed: bool = False
    num_placements: int = 0  # adapters that it brought to the device
    # Drafts that it verified, and of each row with drafts that were right, how many.
    num_drafts: int = 0
    accepted: tuple[int, ...] = ()


class SchedulerLoad(Protocol):
    """What a scheduler can tell at any time."""

    @property
    def queue_size(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def queue_age(self) -> float:
        """Seconds since the oldest request in the queue came."""
        ...

    @property
    def running(self) -> int:
        """Requests running."""
        ...

    @property
    def max_running_tokens(self) -> int:
        """Tokens that the running requests hold or may still come to."""
        ...

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks that requests use."""
        ...


class Metrics:
    def __init__(self, limits: ModelLimits) -> None:
        self._concat_reason = "backpressure" if limits.has_encoder else "chunking"
        self._values: dict[str, Value] = {}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in ALL.values():
            self._values[metric.name] = self._value(metric, limits)
        self._gauges["tgi_batch_max_total_tokens"].watch(lambda: limits.max_batch_total_tokens)
        self._gauges["vllm:lora_requests_info"].watch(time.time, lambda: adapter_labels(0, (), ()))
        # Exported and dropped since it was called last.
        self._take_spans: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def _value(self, metric: Metric, limits: ModelLimits) -> Value:
        match metric.kind:
            case "counter":
                return self._counters.setdefault(metric.name, Counter(metric.labels))
            case "gauge":
                return self._gauges.setdefault(metric.name, Gauge())
            case "histogram":
                return self._histograms.setdefault(metric.name, Histogram(metric.labels, metric.bounds(limits)))

    def watch(self, load: SchedulerLoad) -> None:
        """Gauges that are read at every scrape."""
        gauges = self._gauges
        for name in ("tgi_queue_size", "vllm:num_requests_waiting"):
            gauges[name].watch(lambda: load.queue_size)
        for name in ("tgi_batch_current_size", "vllm:num_requests_running"):
            gauges[name].watch(lambda: load.running)
        for name in ("legato_kv_usage", "vllm:kv_cache_usage_perc"):
            gauges[name].watch(lambda: load.kv_usage)
        gauges["legato_queue_oldest_seconds"].watch(lambda: load.queue_age)
        gauges["tgi_batch_current_max_tokens"].watch(lambda: load.max_running_tokens)

    def watch_adapters(self, labels: Callable[[], dict[str, str]], num_loaded: Callable[[], int]) -> None:
        """`labels` as `adapter_labels` makes them."""
        self._gauges["vllm:lora_requests_info"].watch(time.time, labels)
        self._gauges["legato_adapters_loaded"].watch(num_loaded)

    # ---- requests -------------------------------------------------------------------------------------------------

    def request_arrived(self) -> None:
        self._counters["tgi_request_count"].inc()

    def request_validated(self, input_len: int, max_new_tokens: int) -> None:
        self._histograms["tgi_request_input_length"].observe(input_len)
        self._histograms["tgi_request_max_new_tokens"].observe(max_new_tokens)

    def request_failed(self, reason: str) -> None:
        """One of `FAILURES`; `dropped` when the client hung up."""
        self._counters["tgi_request_failure"].inc(reason if reason in FAILURES else "internal")

    def request_succeeded(self, timings: Timings, num_tokens: int) -> None:
        self._counters["tgi_request_success"].inc()
        observed = {
            "tgi_request_duration": timings.total,
            "tgi_request_validation_duration": timings.validation,
            "tgi_request_queue_duration": timings.queue,
            "tgi_request_inference_duration": timings.inference,
            "tgi_request_mean_time_per_token_duration": timings.per_token,
            "legato_time_to_first_token_seconds": timings.to_first_token,
            "tgi_request_generated_tokens": num_tokens,
        }
        for name, value in observed.items():
            self._histograms[name].observe(value)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def step(self, step: StepFigures) -> None:
        counters, histograms, method = self._counters, self._histograms, step.method
        counters["tgi_batch_inference_count"].inc(method)
        if step.failed:
            counters["tgi_batch_inference_failure"].inc(method)
            return
        counters["tgi_batch_inference_success"].inc(method)
        histograms["tgi_batch_inference_duration"].observe(step.inference_time, method)
        histograms["tgi_batch_forward_duration"].observe(step.forward_time, method)
        histograms["tgi_batch_decode_duration"].observe(step.decode_time, method)
        histograms["tgi_batch_filter_duration"].observe(step.filter_time, method)
        counters["legato_generated_tokens"].inc(by=step.num_tokens)
        # Every token that no step had to be waited for was a draft of the step that brought the one before.
        skipped = histograms["tgi_request_skipped_tokens"]
        skipped.observe(0, times=step.num_tokens - sum(step.accepted) - len(step.accepted))
        for num_accepted in step.accepted:
            skipped.observe(num_accepted)
        if step.num_drafts:
            counters["legato_draft_tokens"].inc(by=step.num_drafts)
            counters["legato_accepted_draft_tokens"].inc(by=sum(step.accepted))
        if step.num_gaps:
            histograms["legato_inter_token_seconds"].observe(step.gap, times=step.num_gaps)
        if step.num_placements:
            counters["legato_adapter_placements"].inc(by=step.num_placements)
        if step.num_preempted:
            counters["legato_preemptions"].inc(by=step.num_preempted)
        if step.num_admitted:
            self._admitted(step)

    def _admitted(self, step: StepFigures) -> None:
        self._histograms["tgi_batch_next_size"].observe(step.num_admitted)
        self._counters["legato_prompt_tokens"].inc(by=step.num_prompt_tokens)
        self._counters["legato_prefix_hit_tokens"].inc(by=step.num_cached_tokens)
        if step.batch_size > step.num_admitted:
            self._counters["tgi_batch_concat"].inc(self._concat_reason)
            self._histograms["tgi_batch_concat_duration"].observe(step.planning_time, "decode")

    # ---- processes ------------------------------------------------------------------------------------------------

    def restarted(self, process: Literal["shard", "http_worker"]) -> None:
        self._counters["legato_restarts"].inc(process)

    def replayed(self, num_requests: int) -> None:
        """Requests in flight that go on in a restarted shard."""
        self._counters["legato_replayed_requests"].inc(by=num_requests)

    def loop_lag(self, process: Literal["scheduler", "http_worker"], seconds: float) -> None:
        self._histograms["legato_event_loop_lag_seconds"].observe(seconds, process)

    def watch_spans(self, take: Callable[[], tuple[int, int]]) -> None:
        """`take` returns how many spans were exported and dropped since it was called last."""
        self._take_spans = take

    # ---- text -----------------------------------------------------------------------------------------------------

    def figures(self) -> Figures:
        """What adds up over processes: everything but gauges, which are the scheduler's own."""
        self._count_spans()
        found = {name: value.samples(name) for name, value in self._values.items() if name not in self._gauges}
        return {name: {sample: value for sample, value in samples if value} for name, samples in found.items()}

    def render(self, others: Figures | None = None) -> bytes:
        """The text format, with what `others` have counted added to our own numbers."""
        self._count_spans()
        return "".join(self._lines(others or {})).encode()

    def _count_spans(self) -> None:
        exported, dropped = self._take_spans()
        self._counters["legato_trace_spans_exported"].inc(by=exported)
        self._counters["legato_trace_spans_dropped"].inc(by=dropped)

    def _lines(self, others: Figures) -> Iterator[str]:
        for name, values in self._values.items():
            yield f"# HELP {name} {ALL[name].help}\n# TYPE {name} {ALL[name].kind}\n"
            added = others.get(name, {})
            for sample, value in values.samples(name):
                yield f"{sample} {value + added.get(sample, 0.0)!r}\n"


def adapter_labels(num_loaded: int, running: Iterable[str], waiting: Iterable[str]) -> dict[str, str]:
    """What the protocol wants to know of LoRA adapters, by name, also if there are none."""
    names = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
    return {"max_lora": str(num_loaded), **{label: ",".join(sorted(set(found))) for label, found in names.items()}}


def add_up(all_figures: Iterable[Figures]) -> Figures:
    total: Figures = {}
    for figures in all_figures:
        for metric, samples in figures.items():
            sums = total.setdefault(metric, {})
            for name, value in samples.items():
                sums[name] = sums.get(name, 0.0) + value
    return total
