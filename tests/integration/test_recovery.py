"""Processes that die under load are replaced, and streams go on as if nothing had happened."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.client import JSON, Client, at_once
from tests.integration.processes import Launched, has_ended, launched, until
from tests.integration.test_workers import workers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    """Shared by tests that leave it as they found it, but for the age of its processes."""
    folder = tmp_path_factory.mktemp("recovery")
    with launched(folder, model, "--max-restarts=100", "--http-workers=1") as running:
        yield running


NUM_TOKENS = 400
LONG = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
REQUESTS: dict[str, JSON] = {
    "greedy": {**LONG},
    "seed and penalties": {
        **LONG,
        "do_sample": True,
        "seed": 7,
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
    },
    "top tokens": {**LONG, "top_n_tokens": 3},
    "regex": {**LONG, "grammar": {"type": "regex", "value": "[a-z ]{900,}"}, "ignore_eos": False},
    "stop": {**LONG, "stop": ["never to be found"]},
}


def collect(client: Client, name: str) -> list[JSON]:
    return list(client.stream(f"Once upon a time, {name}", **REQUESTS[name]))


def assert_same(events: list[JSON], expected: list[JSON], name: str) -> None:
    """Tokens and text are equal; logprobs up to what sums in another order make of them."""
    assert "error" not in events[-1], (name, events[-1])
    assert [event["token"]["id"] for event in events] == [event["token"]["id"] for event in expected], name
    assert events[-1]["generated_text"] == expected[-1]["generated_text"], name
    for event, other in zip(events, expected, strict=True):
        assert event["token"]["logprob"] == pytest.approx(other["token"]["logprob"], abs=1e-3), name
        assert [each["id"] for each in event.get("top_tokens", [])] == [
            each["id"] for each in other.get("top_tokens", [])
        ]


def test_streams_go_on_after_their_shard_was_killed_as_if_it_had_not(server: Launched) -> None:
    expected = [collect(server.client, name) for name in REQUESTS]
    pid = server.shard().pid
    streams = [server.client.stream(f"Once upon a time, {name}", **REQUESTS[name]) for name in REQUESTS]
    begun = [[next(events) for _ in range(5)] for events in map(iter, streams)]
    server.shard().kill()
    rest = at_once([partial(list, stream) for stream in streams])
    for name, first, more, undisturbed in zip(REQUESTS, begun, rest, expected, strict=True):
        assert_same([*first, *more], undisturbed, name)
    until(lambda: server.client.get("/health").status == 200, "the server is healthy")
    assert server.shard().pid != pid


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"digits": {"type": "array", "items": DIGIT, "minItems": 60, "maxItems": 80}},
            "required": ["digits"],
        },
    },
}
SAMPLED = {"temperature": 0.9, "seed": 3}
WHOLE: dict[str, tuple[str, JSON]] = {
    "prompt logprobs": (
        "/generate",
        {
            "inputs": "Once upon a time",
            "parameters": {
                **LONG,
                "do_sample": True,
                "seed": 5,
                "details": True,
                "decoder_input_details": True,
            },
        },
    ),
    "n": (
        "/v1/completions",
        {"prompt": "Once", "max_tokens": NUM_TOKENS, "n": 2, "ignore_eos": True, "logprobs": 1, **SAMPLED},
    ),
    "schema": (
        "/generate",
        {
            "inputs": "Write",
            "parameters": {
                "max_new_tokens": NUM_TOKENS,
                "grammar": {"type": "json", "value": TOOL["function"]["parameters"]},
            },
        },
    ),
    "tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Write"}],
            "max_tokens": NUM_TOKENS,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "note"}},
            **SAMPLED,
        },
    ),
}


# Without a seed, which TGI does not take here.
BEST_OF = {"inputs": "Once", "parameters": {**LONG, "do_sample": True, "best_of": 2, "details": True}}


def essence(answer: JSON) -> Any:
    """What must be equal: texts, tokens and calls, without times, numbers and last bits of logprobs."""
    if "choices" in answer:
        return [
            choice.get("text") or [call["function"] for call in choice["message"]["tool_calls"]]
            for choice in answer["choices"]
        ]
    details = answer.get("details") or {}
    prompt = [token["id"] for token in details.get("prefill", [])]
    return answer["generated_text"], prompt, [token["id"] for token in details.get("tokens", [])]


def test_choices_schemas_tools_and_prompt_logprobs_survive_a_killed_shard(chatty: Launched) -> None:
    def ask(name: str) -> Any:
        answer = chatty.client.post(*WHOLE[name])
        assert answer.status == 200, (name, answer.body)
        return essence(answer.json())

    expected = [ask(name) for name in WHOLE]
    with ThreadPoolExecutor(len(WHOLE) + 1) as pool:
        asked = [pool.submit(ask, name) for name in WHOLE]
        best = pool.submit(chatty.client.post, "/generate", BEST_OF)
        until(lambda: chatty.client.metric("tgi_batch_current_size") >= 7, "all requests run")
        chatty.shard().kill()
        assert [each.result() for each in asked] == expected
        details = best.result().json()["details"]
        sequences = [details, *details["best_of_sequences"]]
        assert [each["generated_tokens"] for each in sequences] == [NUM_TOKENS, NUM_TOKENS]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    """A server whose model has a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    options = (f"--tokenizer-config-path={folder}/tokenizer_config.json", "--tool-call-parser=json")
    with launched(folder, model, "--max-restarts=100", "--http-workers=1", *options) as running:
        yield running


def router_of(server: Launched) -> psutil.Process:
    return next(child for child in server.children() if "--master-shard-uds-path" in " ".join(child.cmdline()))


def until_ready(server: Launched) -> None:
    def is_ready() -> bool:
        try:
            return server.client.get("/readyz").status == 200
        except OSError:
            return False

    until(is_ready, "the server is ready")


def test_the_server_is_not_ready_but_alive_while_the_shard_is_replaced(server: Launched) -> None:
    server.shard().kill()
    until(lambda: server.client.get("/readyz").status == 503, "the server is not ready")
    assert server.client.get("/health").status == 503
    assert server.client.get("/livez").json()["live"] is True
    answer = server.client.generate("A request while there is no shard", max_new_tokens=4, ignore_eos=True)
    assert answer["generated_text"]
    until_ready(server)
    assert server.client.get("/health").status == 200


def test_a_killed_router_is_replaced_and_the_shard_keeps_its_weights(server: Launched) -> None:
    expected = server.client.generate("Once", max_new_tokens=20, ignore_eos=True)["generated_text"]
    shard, router = server.shard(), router_of(server)
    stream = server.client.stream("Once", max_new_tokens=4000, ignore_eos=True)
    next(iter(stream))
    router.kill()
    with suppress(OSError, AssertionError, http.client.HTTPException):
        assert all(event["generated_text"] is None for event in stream), "the stream breaks off"
    until(lambda: has_ended(router), "the router is dead")
    until_ready(server)
    assert server.shard() == shard
    assert router_of(server) != router
    assert server.client.generate("Once", max_new_tokens=20, ignore_eos=True)["generated_text"] == expected


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    """A server that takes silence for a hang soon, but not so soon that a busy machine looks like one."""
    folder = tmp_path_factory.mktemp("hangs")
    with launched(folder, model, "--max-restarts=100", "--http-workers=2", "--hang-timeout=4") as running:
        yield running


def test_a_stopped_shard_is_replaced_and_its_stream_goes_on(impatient: Launched) -> None:
    expected = list(impatient.client.stream("Once", **LONG))
    events = iter(impatient.client.stream("Once", **LONG))
    begun = [next(events) for _ in range(5)]
    shard = impatient.shard()
    shard.suspend()
    assert_same([*begun, *events], expected, "stopped")
    until_ready(impatient)
    assert impatient.shard() != shard
    assert "the shards have not finished a step for 4 s (--hang-timeout)" in impatient.log


def test_a_stopped_shard_without_work_is_noticed_too(impatient: Launched) -> None:
    shard = impatient.shard()
    shard.suspend()
    until(lambda: impatient.client.get("/readyz").status == 503, "the server is not ready")
    until_ready(impatient)
    assert impatient.shard() != shard


def test_a_stopped_worker_is_replaced(impatient: Launched) -> None:
    stopped = workers(impatient)[0]
    stopped.suspend()
    until(lambda: stopped not in workers(impatient) and len(workers(impatient)) == 2, "it is replaced")
    impatient.until_logged("is hung (--hang-timeout 4): killing it")
    until_ready(impatient)


def test_a_stopped_router_is_replaced_and_the_shard_keeps_its_weights(impatient: Launched) -> None:
    shard, router = impatient.shard(), router_of(impatient)
    router.suspend()
    until(lambda: "router is hung: no heartbeat for 4 s" in impatient.log, "the launcher notices")
    until(lambda: impatient.log.rpartition("router is hung")[2].count("Ready again") == 1, "it is replaced")
    until_ready(impatient)
    assert impatient.shard() == shard
