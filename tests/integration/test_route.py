"""`legato route` in front of two servers: real processes, a fake shard, one of the servers killed under its streams."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client, EventStream, at_once
from tests.integration.processes import PATIENCE, Launched, Program, launched, until

KEY = "a-key-of-the-cluster"
FAKE = ("--fake", "--fake-step-ms=4", f"--route-key={KEY}", "--http-workers=1", "--prometheus-port=0")


class Balancer(Program):
    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        words = ("route", "--hostname=127.0.0.1", f"--port={self.port}", "--probe-interval=0.2", *arguments)
        super().__init__(folder, "legato", *words)
        self.client = Client(self.port)

    @property
    def num_available(self) -> int:
        return int(self.client.metric("legato_route_replicas_available"))


@dataclass
class Cluster:
    servers: list[Launched]
    balancer: Balancer


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    template = tmp_path / "tokenizer_config.json"
    template.write_text(json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}))
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            servers.append(stack.enter_context(launched(folder, model, *FAKE, f"--tokenizer-config-path={template}")))
        urls = [f"--replica=http://127.0.0.1:{server.port}" for server in servers]
        balancer = Balancer(tmp_path, f"--route-key={KEY}", *urls)
        stack.callback(balancer.end)
        balancer.until_logged("Listening")
        until(lambda: balancer.num_available == 2, "two replicas")
        yield Cluster(servers, balancer)


def kill(server: Launched) -> None:
    """All of it at once, as when a machine loses power."""
    for process in [psutil.Process(server.process.pid), *server.children()]:
        process.kill()


def post(port: int, path: str, body: Any) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(body))
    return connection.getresponse()


def text_stream(port: int, number: int, path: str, num_tokens: int) -> bytes:
    """The whole stream, without what is another in every answer."""
    body: dict[str, Any] = {"stream": True, "max_tokens": num_tokens, "ignore_eos": True, "seed": number}
    body |= (
        {"prompt": f"stream {number}"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": str(number)}]}
    )
    response = post(port, path, body)
    assert response.status == 200, response.read()
    lines = [line for line in response.read().split(b"\n\n") if line.startswith(b"data: {")]
    events = [json.loads(line[6:]) for line in lines]
    assert len({event["id"] for event in events}) == 1 and len({event["created"] for event in events}) == 1
    parts = [event["choices"][0] for event in events if event["choices"]]
    return "".join(part.get("text", part.get("delta", {}).get("content")) or "" for part in parts).encode()


def native_stream(port: int, number: int, num_tokens: int) -> list[tuple[int, int]]:
    body = {"inputs": f"stream {number}", "parameters": {"max_new_tokens": num_tokens, "ignore_eos": True}}
    response = post(port, "/generate_stream", body)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    events = list(EventStream(connection, response))
    assert "generated_text" in events[-1], events[-1]
    return [(event["index"], event["token"]["id"]) for event in events]


def test_streams_of_a_killed_replica_go_on_without_a_repeated_token(cluster: Cluster) -> None:
    first, second = cluster.servers
    port, num_tokens = cluster.balancer.port, 200
    native = [lambda n=n: native_stream(port, n, num_tokens) for n in range(24)]
    texts = [
        lambda n=n, path=path: text_stream(port, n, path, num_tokens)
        for n in range(8)
        for path in ("/v1/completions", "/v1/chat/completions")
    ]
    with ThreadPoolExecutor(40) as pool:
        streams = [pool.submit(call) for call in [*native, *texts]]
        until(lambda: first.client.metric("legato_generated_tokens") > 400, "tokens of the first replica")
        kill(first)
        found = [stream.result() for stream in streams]
    assert cluster.balancer.client.metric("legato_route_moves") > 5
    assert all([index for index, _ in tokens] == list(range(1, num_tokens + 1)) for tokens in found[:24])
    assert found[:24] == at_once([lambda n=n: native_stream(second.port, n, num_tokens) for n in range(24)])
    expected = at_once(
        [
            lambda n=n, path=path: text_stream(second.port, n, path, num_tokens)
            for n in range(8)
            for path in ("/v1/completions", "/v1/chat/completions")
        ]
    )
    assert found[24:] == expected
    until(lambda: cluster.balancer.num_available == 1, "the balancer notices")


def test_answers_are_passed_on_and_draining_replicas_get_nothing(cluster: Cluster) -> None:
    first, second = cluster.servers
    client = cluster.balancer.client
    direct, routed = first.client.get("/info"), client.get("/info")
    assert routed.body == direct.body
    assert set(routed.headers) == set(direct.headers)
    for path, body in [("/generate", {"inputs": ""}), ("/v1/completions", {"prompt": 1}), ("/generate", b"{")]:
        direct, routed = first.client.post(path, body), client.post(path, body)
        assert (routed.status, routed.body) == (direct.status, direct.body) and routed.status >= 400
    assert client.post("/drain", {}).status == 404
    assert first.client.post("/drain", {}).status == 200
    until(lambda: cluster.balancer.num_available == 1, "one replica is left")
    before = first.client.metric("tgi_request_count")
    answers = at_once([lambda n=n: client.generate(f"hi {n}", max_new_tokens=5) for n in range(8)])
    assert len(answers) == 8 and first.client.metric("tgi_request_count") == before
    second.process.terminate()
    until(lambda: cluster.balancer.num_available == 0, "none is left")
    answer = client.post("/v1/completions", {"prompt": "hi"})
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert "no replica is ready" in answer.json()["error"]["message"]
    assert client.get("/readyz").status == 503 and client.get("/livez").status == 200
