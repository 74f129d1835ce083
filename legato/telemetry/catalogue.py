"""Every metric: name, type, labels, buckets and meaning. `docs/metrics.md` and `dashboards/legato.json` are made of it.

Names that begin with `tgi_` are TGI's and have its meaning; the four with `vllm:` are those of the model-server
protocol, which the endpoint pickers of inference gateways ask for; ours begin with `legato_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from legato.scheduling.state import ModelLimits

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "tokens", "requests", "fraction"]

METHODS = ("prefill", "decode")
# Why requests fail. TGI's first; `incomplete` never occurs, because every request ends in one terminal event.
FAILURES: tuple[str, ...] = ("overloaded", "validation", "template", "incomplete", "dropped", "generation")
FAILURES += ("internal", "timeout", "tool_error", "draining")
CONCAT_REASONS = ("backpressure", "chunking", "wait_exceeded")
# The processes that are restarted, and those that have an event loop. A new router counts from zero anyway.
RESTARTED = ("shard", "http_worker")
LOOPS = ("scheduler", "http_worker")

DURATION_BUCKETS = tuple(0.0001 * 1.5**n for n in range(1, 36))
BATCH_SIZE_BUCKETS = tuple(float(size) for size in range(1, 1025))
SKIPPED_BUCKETS = tuple(float(number) for number in range(17))
# Ours have fewer than TGI's, so that there are no more than 2,000 series.
FIRST_TOKEN_BUCKETS = tuple(0.003 * 1.6**n for n in range(23))
GAP_BUCKETS = tuple(0.0015 * 1.6**n for n in range(20))
LAG_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    # Heading of its panel in the dashboard; empty: it has none.
    title: str
    help: str
    unit: Unit = ""
    labels: dict[str, Sequence[str]] = field(default_factory=dict)
    buckets: Literal["duration", "first_token", "gap", "lag", "input", "total", "batch", "skipped"] = "duration"

    def bounds(self, limits: ModelLimits) -> Sequence[float]:
        match self.buckets:
            case "input":
                return _steps(limits.max_input_tokens)
            case "total":
                return _steps(limits.max_total_tokens)
            case "batch":
                return BATCH_SIZE_BUCKETS
            case "skipped":
                return SKIPPED_BUCKETS
            case "first_token":
                return FIRST_TOKEN_BUCKETS
            case "gap":
                return GAP_BUCKETS
            case "lag":
                return LAG_BUCKETS
            case _:
                return DURATION_BUCKETS


def _steps(maximum: int) -> list[float]:
    """A hundred equal steps up to the maximum."""
    return [maximum / 100 * n for n in range(1, 101)]


def _seconds(name: str, title: str, help: str, **labels: Sequence[str]) -> Metric:
    return Metric(name, "histogram", title, help, "seconds", labels)


def _counter(name: str, title: str, help: str, unit: Unit = "requests", **labels: Sequence[str]) -> Metric:
    return Metric(name, "counter", title, help, unit, labels)


def _gauge(name: str, title: str, help: str, unit: Unit = "requests") -> Metric:
    return Metric(name, "gauge", title, help, unit)


def _tokens(name: str, title: str, help: str, buckets: Literal["input", "total"]) -> Metric:
    return Metric(name, "histogram", title, help, "tokens", buckets=buckets)


REQUESTS = (
    _counter("tgi_request_count", "Requests", "Requests received."),
    _counter("tgi_request_success", "Successes", "Requests completed."),
    _counter("tgi_request_failure", "Failures", "Requests refused or failed, by reason.", err=FAILURES),
    _seconds("tgi_request_duration", "Duration", "Seconds from arrival to the end of the response."),
    _seconds("tgi_request_validation_duration", "Validation", "Seconds for validation and tokenization."),
    _seconds("tgi_request_queue_duration", "Queue time", "Seconds in the queue."),
    _seconds("tgi_request_inference_duration", "Inference", "Seconds from leaving the queue to the end of generation."),
    _seconds(
        "tgi_request_mean_time_per_token_duration", "Time per token", "Seconds of inference per generated token."
    ),
    Metric(
        "legato_time_to_first_token_seconds", "histogram", "Time to first token",
        "Seconds from arrival to the first token.", "seconds", buckets="first_token",
    ),
    Metric(
        "legato_inter_token_seconds", "histogram", "Inter-token gaps",
        "Seconds between two tokens of a request, as they reach the scheduler; pauses due to preemption are excluded.",
        "seconds", buckets="gap",
    ),
    _tokens("tgi_request_input_length", "Prompt length", "Prompt tokens of a request.", "input"),
    _tokens("tgi_request_max_new_tokens", "Requested tokens", "Maximum generated tokens of a request.", "total"),
    _tokens("tgi_request_generated_tokens", "Generated tokens", "Tokens generated for a request.", "total"),
    Metric(
        "tgi_request_skipped_tokens",
        "histogram",
        "Speculated tokens",
        "Tokens of a request per step after the first (accepted drafts).",
        "tokens",
        buckets="skipped",
    ),
)  # fmt: skip

BATCHES = (
    _gauge("tgi_queue_size", "Queue", "Requests in the queue."),
    _gauge(
        "legato_queue_oldest_seconds", "Oldest in the queue", "Age of the oldest request in the queue, in seconds.",
        "seconds",
    ),
    _gauge("tgi_batch_current_size", "Running", "Requests running."),
    _gauge(
        "tgi_batch_current_max_tokens", "Tokens of the batch", "Sum of the maximum tokens of the running requests.",
        "tokens",
    ),
    _gauge("tgi_batch_max_total_tokens", "KV capacity", "Capacity of the KV cache in tokens.", "tokens"),
    _gauge("legato_kv_usage", "KV cache in use", "Fraction of KV blocks used by running requests, 0 to 1.", "fraction"),
    _gauge("legato_adapters_loaded", "LoRA adapters", "LoRA adapters that are loaded.", ""),
    _counter(
        "legato_adapter_placements", "Adapters placed", "LoRA adapters copied from host memory to the device.", ""
    ),
    _counter("legato_prompt_tokens", "Prompt tokens", "Prompt tokens of admitted requests.", "tokens"),
    _counter("legato_prefix_hit_tokens", "Prefix hits", "Prompt tokens found in the prefix cache.", "tokens"),
    _counter("legato_generated_tokens", "Throughput", "Tokens generated, counted at every step.", "tokens"),
    _counter("legato_draft_tokens", "Drafts", "Draft tokens verified by steps (speculative decoding).", "tokens"),
    _counter(
        "legato_accepted_draft_tokens", "Accepted drafts", "Draft tokens that equalled the sampled token.", "tokens"
    ),
    _counter(
        "legato_preemptions", "Preemptions", "Preemptions: requests that released their blocks, to be resumed later."
    ),
    _counter(
        "tgi_batch_concat",
        "Joins",
        "Steps that admitted requests while others were running: `chunking`, or `backpressure` for models without"
        " chunked prefill; `wait_exceeded` never occurs, because no request waits for others to decode.",
        "",
        reason=CONCAT_REASONS,
    ),
    Metric(
        "tgi_batch_next_size", "histogram", "Admitted together", "Requests admitted by a step.", "requests",
        buckets="batch",
    ),
)  # fmt: skip

STEPS = (
    _counter("tgi_batch_inference_count", "Steps", "Steps executed.", "", method=METHODS),
    _counter("tgi_batch_inference_success", "Steps done", "Steps that succeeded.", "", method=METHODS),
    _counter("tgi_batch_inference_failure", "Steps failed", "Steps that failed.", "", method=METHODS),
    _seconds(
        "tgi_batch_inference_duration", "Step time", "Seconds from sending a step to receiving its tokens.",
        method=METHODS,
    ),
    _seconds("tgi_batch_forward_duration", "Forward pass", "Seconds of a step on the device.", method=METHODS),
    _seconds(
        "tgi_batch_decode_duration", "Token decode", "Seconds of a step in the shard, without the forward pass.",
        method=METHODS,
    ),
    _seconds(
        "tgi_batch_filter_duration", "Filter", "Seconds to deliver the tokens of a step and drop ended requests.",
        method=METHODS,
    ),
    _seconds(
        "tgi_batch_concat_duration", "Concatenate", "Seconds to plan a step that admits requests while others run.",
        method=("decode",),
    ),
)  # fmt: skip

PROCESSES = (
    _counter("legato_restarts", "Restarts", "Processes restarted after they died or hung.", "", process=RESTARTED),
    _counter("legato_replayed_requests", "Replays", "Requests continued after shards were restarted."),
    Metric(
        "legato_event_loop_lag_seconds", "histogram", "Event loop lag",
        "Seconds by which an event loop runs a timer too late.", "seconds", {"process": LOOPS}, "lag",
    ),
    _counter("legato_trace_spans_exported", "Spans exported", "Spans that the collector has accepted.", ""),
    _counter(
        "legato_trace_spans_dropped", "Spans dropped", "Spans lost because the collector is down or slow.", ""
    ),
)  # fmt: skip

PROTOCOL = (
    _gauge("vllm:num_requests_waiting", "", "Requests in the queue."),
    _gauge("vllm:num_requests_running", "", "Requests running."),
    _gauge("vllm:kv_cache_usage_perc", "", "Fraction of KV blocks used by running requests, 0 to 1.", "fraction"),
    _gauge(
        "vllm:lora_requests_info",
        "",
        "Labels: LoRA adapters of running and queued requests, and how many can be loaded; the value is a timestamp.",
        "",
    ),
)

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Requests": REQUESTS,
    "Queue, batch and memory": BATCHES,
    "Steps": STEPS,
    "Processes and traces": PROCESSES,
    "Model-server protocol": PROTOCOL,
}
ALL = {metric.name: metric for group in GROUPS.values() for metric in group}
