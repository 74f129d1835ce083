from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from legato.http.app import create_app
from legato.scheduling.state import Output
from legato.telemetry.metrics import BATCH_SIZE_BUCKETS, DURATION_BUCKETS, Metrics, StepFigures
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend, get, post, token_ids, tokenizer

STEP = StepFigures(
    method="prefill",
    batch_size=5,
    num_admitted=2,
    inference_time=0.01,
    forward_time=0.008,
    delivery_time=0.0001,
    planning_time=0.0002,
    max_tokens=640,
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_preempted=1,
    kv_usage=0.25,
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
    expected = dict.fromkeys(counters, "counter") | dict.fromkeys(gauges, "gauge")
    expected |= dict.fromkeys(histograms, "histogram") | {"request_skipped_tokens": "summary"}
    found = types(Metrics(LIMITS).render())
    assert {f"tgi_{name}": kind for name, kind in expected.items()}.items() <= found.items()
    ours = found.keys() - {f"tgi_{name}" for name in expected}
    assert ours == {"tgi_request_time_to_first_token"} | {name for name in ours if name.startswith("legato_")}


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
        assert found["tgi_request_skipped_tokens_count"] == 2
        for stage in ("", "_validation", "_queue", "_inference", "_mean_time_per_token"):
            assert found[f"tgi_request{stage}_duration_count"] == 2
        assert found["tgi_request_time_to_first_token_count"] == 2
        assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (3, 2)
        assert found["tgi_batch_max_total_tokens"] == LIMITS.max_batch_total_tokens

    asyncio.run(main())
