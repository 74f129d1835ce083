"""TGI's dashboard under load: none of its panels is empty."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client, at_once
from tests.integration.processes import launched, until
from tests.telemetry.test_metrics import samples

# What the 34 panels of TGI's Grafana dashboard ask for: histograms by their number of values, with the method that is
# asked for; gauges while requests run; counters.
HISTOGRAMS = (
    "tgi_request_queue_duration_count",
    "tgi_request_duration_count",
    "tgi_request_mean_time_per_token_duration_count",
    "tgi_request_input_length_count",
    "tgi_request_generated_tokens_count",
    "tgi_request_skipped_tokens_count",
    'tgi_batch_inference_duration_count{method="prefill"}',
    'tgi_batch_inference_duration_count{method="decode"}',
    'tgi_batch_forward_duration_count{method="decode"}',
    'tgi_batch_decode_duration_count{method="decode"}',
    'tgi_batch_filter_duration_count{method="decode"}',
    'tgi_batch_concat_duration_count{method="decode"}',
)
COUNTERS = (
    "tgi_request_count",
    "tgi_request_success",
    'tgi_request_failure{err="validation"}',
    'tgi_batch_concat{reason="chunking"}',
)
GAUGES = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens")
# Ours, and those of the model-server protocol, under the same load.
OURS = (
    "legato_time_to_first_token_seconds_count",
    "legato_inter_token_seconds_count",
    "legato_generated_tokens",
    "legato_prompt_tokens",
    "legato_prefix_hit_tokens",
    'legato_event_loop_lag_seconds_count{process="scheduler"}',
    'legato_event_loop_lag_seconds_count{process="http_worker"}',
)
LOADED = ("legato_kv_usage", "legato_queue_oldest_seconds", "vllm:num_requests_waiting", "vllm:num_requests_running")


def test_every_panel_of_tgis_dashboard_has_data_under_load(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> None:
    port = free_port()
    words = ("--fake", "--fake-step-ms=5", "--max-batch-size=2", f"--prometheus-port={port}")
    with launched(tmp_path_factory.mktemp("metrics"), model, *words) as server:
        client, metrics = server.client, Client(port)
        client.post("/generate", {"inputs": ""})
        peak: dict[str, float] = {}

        def loaded() -> bool:
            for name, value in samples(metrics.get("/metrics").body).items():
                peak[name] = max(peak.get(name, 0.0), value)
            return all(peak[name] > 0 for name in (*GAUGES, *LOADED))

        generate = partial(client.generate, "a prompt of several tokens, again and again", max_new_tokens=60)
        watch = partial(until, loaded, "all gauges are above zero at some time")
        at_once([watch, *[generate] * 6])
        found = samples(metrics.get("/metrics").body)
        assert not [name for name in (*HISTOGRAMS, *COUNTERS, *OURS) if found[name] <= 0]
        assert found["legato_generated_tokens"] == found["tgi_request_generated_tokens_sum"] == 6 * 60
        assert [found[name] for name in GAUGES] == [0, 0, 0]
        assert samples(client.get("/metrics").body).keys() == found.keys()
