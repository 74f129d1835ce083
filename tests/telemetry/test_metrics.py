from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from legato.api.errors import RequestError
from legato.http.app import create_app
from legato.scheduling.state import Output
from legato.telemetry.catalogue import BATCH_SIZE_BUCKETS, DURATION_BUCKETS, FAILURES
from legato.telemetry.metrics import Metrics, StepFigures
from legato.telemetry.values import Histogram
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend, get, post, token_ids, tokenizer

STEP = StepFigures(
    method="prefill",
    batch_size=5,
    num_admitted=2,
    inference_time=0.01,
    forward_time=0.008,
    decode_time=0.001,
    filter_time=0.0001,
    planning_time=0.0002,
    num_tokens=5,
    num_gaps=3,
    gap=0.02,
    num_computed=103,
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_preempted=1,
)


def samples(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def types(text: bytes) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text.decode(), re.MULTILINE))


def test_every_metric_of_tgi_is_there_with_its_type() -> None:
    counters = ["request_count", "request_success", "request_failure", "batch_concat"]
    counters += [f"batch_inference_{what}" for what in ("count", "success", "failure")]
    gauges = ["queue_size", "batch_current_size", "batch_current_max_tokens", "batch_max_total_tokens"]
    stages = ("", "_validation", "_queue", "_inference", "_mean_time_per_token")
    histograms = [f"request{stage}_duration" for stage in stages]
    histograms += [f"batch_{stage}_duration" for stage in ("inference", "forward", "decode", "filter", "concat")]
    histograms += ["request_generated_tokens", "request_input_length", "request_max_new_tokens", "batch_next_size"]
    histograms += ["request_skipped_tokens"]  # TGI's dashboard asks for its buckets, which TGI never had
    expected = dict.fromkeys(counters, "counter") | dict.fromkeys(gauges, "gauge")
    expected |= dict.fromkeys(histograms, "histogram")
    found = types(Metrics(LIMITS).render())
    assert {f"tgi_{name}": kind for name, kind in expected.items()}.items() <= found.items()
    ours = found.keys() - {f"tgi_{name}" for name in expected}
    assert all(name.startswith(("legato_", "vllm:")) for name in ours)


def test_the_metrics_of_the_model_server_protocol_are_gauges() -> None:
    metrics = Metrics(LIMITS)
    metrics.watch(FakeBackend())
    text = metrics.render()
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "lora_requests_info")
    assert {f"vllm:{name}": "gauge" for name in names}.items() <= types(text).items()
    found = samples(text)
    assert [found[f"vllm:{name}"] for name in names[:3]] == [3, 2, 0.25]
    labels = 'max_lora="0",running_lora_adapters="",waiting_lora_adapters=""'
    assert found[f"vllm:lora_requests_info{{{labels}}}"] > 1e9


def test_every_series_is_there_from_the_start_and_no_other_comes() -> None:
    metrics = Metrics(LIMITS)
    before = samples(metrics.render()).keys()
    metrics.request_failed("something that a client made up")
    metrics.step(STEP)
    metrics.restarted("shard")
    metrics.replayed(3)
    metrics.loop_lag("scheduler", 0.2)
    found = samples(metrics.render())
    assert found.keys() == before
    assert found['tgi_request_failure{err="internal"}'] == 1
    assert found['legato_restarts{process="shard"}'] == 1 and found["legato_replayed_requests"] == 3
    assert found['legato_event_loop_lag_seconds_count{process="scheduler"}'] == 1
    assert len([name for name in found if "_bucket" not in name]) < 120
    assert len(found) <= 2000  # half of them are the buckets of tgi_batch_next_size


def test_every_error_is_counted_under_a_reason_that_is_declared() -> None:
    def subclasses(kind: type[RequestError]) -> list[type[RequestError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in subclasses(child))]

    elsewhere = {"method_not_allowed", "unauthorized", "healthcheck"}  # not of routes that generate
    for kind in subclasses(RequestError)[1:]:
        error = kind.__new__(kind)
        if hasattr(kind, "error_type") and error.counted_as not in elsewhere:
            assert error.counted_as in FAILURES, kind


def test_spans_are_counted_once() -> None:
    metrics, news = Metrics(LIMITS), [(5, 2), (0, 0), (1, 0)]
    metrics.watch_spans(lambda: news.pop(0))
    assert samples(metrics.render())["legato_trace_spans_exported"] == 5
    assert metrics.figures()["legato_trace_spans_dropped"] == {"legato_trace_spans_dropped": 2}
    assert samples(metrics.render())["legato_trace_spans_exported"] == 6


def test_a_value_is_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram({"method": ("a", "b")}, (1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.observe(value, "a")
    histogram.observe(2.0, "b", times=3)
    found = dict(histogram.samples("x"))
    assert [found[f'x_bucket{{method="a",le="{bound}"}}'] for bound in ("1.0", "2.0", "4.0", "+Inf")] == [2, 3, 4, 5]
    assert (found['x_sum{method="a"}'], found['x_count{method="a"}']) == (16, 5)
    assert (found['x_sum{method="b"}'], found['x_count{method="b"}']) == (6, 3)


def test_buckets_are_tgis() -> None:
    assert len(DURATION_BUCKETS) == 35
    assert DURATION_BUCKETS[0] == pytest.approx(0.00015)
    assert DURATION_BUCKETS[-1] == pytest.approx(145.6, abs=0.1)
    assert tuple(range(1, 1025)) == BATCH_SIZE_BUCKETS
    metrics = Metrics(replace(LIMITS, max_input_tokens=1000, max_total_tokens=2000))
    found = samples(metrics.render())

    def bounds(name: str) -> list[float]:
        pattern = re.compile(rf'{name}_bucket{{le="([\d.]+)"}}')
        return [float(match[1]) for match in map(pattern.match, found) if match]

    assert bounds("tgi_request_input_length") == pytest.approx([10 * n for n in range(1, 101)])
    assert bounds("tgi_request_generated_tokens") == pytest.approx([20 * n for n in range(1, 101)])
    assert bounds("tgi_request_max_new_tokens") == pytest.approx([20 * n for n in range(1, 101)])


def test_no_counter_is_called_total() -> None:
    metrics = Metrics(LIMITS)
    metrics.request_arrived()
    metrics.request_failed("validation")
    text = metrics.render().decode()
    assert "\ntgi_request_count 1.0\n" in text
    assert '\ntgi_request_failure{err="validation"} 1.0\n' in text
    assert "_total " not in text and "_created" not in text


def test_a_step_is_recorded_under_its_method() -> None:
    metrics = Metrics(LIMITS)
    metrics.watch(FakeBackend())
    metrics.step(STEP)
    metrics.step(replace(STEP, method="decode", num_admitted=0))
    metrics.step(replace(STEP, method="decode", failed=True))
    found = samples(metrics.render())
    assert found['tgi_batch_inference_count{method="prefill"}'] == 1
    assert found['tgi_batch_inference_count{method="decode"}'] == 2
    assert found['tgi_batch_inference_success{method="decode"}'] == 1
    assert found['tgi_batch_inference_failure{method="decode"}'] == 1
    assert found['tgi_batch_forward_duration_sum{method="prefill"}'] == pytest.approx(0.008)
    assert found['tgi_batch_concat{reason="chunking"}'] == 1
    assert found["tgi_batch_next_size_count"] == 1
    assert found['tgi_batch_next_size_bucket{le="1.0"}'] == 0
    assert found['tgi_batch_next_size_bucket{le="2.0"}'] == 1
    assert found["tgi_batch_current_max_tokens"] == 640
    assert found['tgi_batch_decode_duration_sum{method="prefill"}'] == pytest.approx(0.001)
    assert found['tgi_batch_filter_duration_count{method="decode"}'] == 1
    assert found['tgi_batch_concat_duration_count{method="decode"}'] == 1
    assert found["legato_generated_tokens"] == found["tgi_request_skipped_tokens_count"] == 10
    assert found["tgi_request_skipped_tokens_sum"] == 0
    assert found["legato_inter_token_seconds_count"] == 6
    assert found["legato_inter_token_seconds_sum"] == pytest.approx(6 * 0.02)
    assert found["legato_preemptions"] == 2
    assert found["legato_queue_oldest_seconds"] == 1.5
    assert found["legato_kv_usage"] == 0.25
    assert (found["legato_prompt_tokens"], found["legato_prefix_hit_tokens"]) == (100, 64)


def test_requests_are_counted_by_how_they_went() -> None:
    async def main() -> None:
        backend = FakeBackend()
        metrics = Metrics(LIMITS)
        metrics.watch(backend)
        app = create_app(backend, tokenizer(), SETTINGS, metrics)
        await post(app, "/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 20}})
        await post(app, "/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 20}})
        await post(app, "/generate_stream", {"inputs": ""})
        await post(app, "/generate", {"inputs": "hi", "parameters": {"best_of": 9}})
        backend.script = lambda request: [Output(error="boom")]
        await post(app, "/generate", {"inputs": "hi"})
        answer = await get(app, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(answer.body)
        assert found["tgi_request_count"] == 5
        assert found["tgi_request_success"] == 2
        assert found['tgi_request_failure{err="validation"}'] == 2
        assert found['tgi_request_failure{err="generation"}'] == 1
        assert found["tgi_request_generated_tokens_sum"] == 2 * (len(token_ids("hello world")) + 1)
        assert found["tgi_request_max_new_tokens_count"] == found["tgi_request_input_length_count"] == 3
        for stage in ("", "_validation", "_queue", "_inference", "_mean_time_per_token"):
            assert found[f"tgi_request{stage}_duration_count"] == 2
        assert found["legato_time_to_first_token_seconds_count"] == 2
        assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (3, 2)
        assert found["tgi_batch_max_total_tokens"] == LIMITS.max_batch_total_tokens

    asyncio.run(main())


def test_drafts_that_were_right_are_tokens_that_a_request_skipped() -> None:
    """Once for every request in a step: two rows without any, one with one and one with three."""
    metrics = Metrics(LIMITS)
    metrics.step(replace(STEP, method="decode", num_tokens=8, num_drafts=7, accepted=(1, 3)))
    found = samples(metrics.render())
    assert found["tgi_request_skipped_tokens_count"] == 4 and found["tgi_request_skipped_tokens_sum"] == 4
    assert found['tgi_request_skipped_tokens_bucket{le="1.0"}'] == 3
    assert (found["legato_draft_tokens"], found["legato_accepted_draft_tokens"]) == (7, 4)
