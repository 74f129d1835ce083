"""Events of the prefix cache over the server's own route: real processes, a fake shard."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from legato.ipc.routed import KEY_HEADER
from tests.integration.processes import Launched, launched

KEY = "a-key-of-the-cluster"


def events(server: Launched, query: str = "", key: str = KEY) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.port}/replica/events{query}"
    with urllib.request.urlopen(urllib.request.Request(url, headers={KEY_HEADER: key}), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_who_knows_the_route_key_reads_what_the_cache_holds(tmp_path: Path, model: Path) -> None:
    words = ("--fake", f"--route-key={KEY}", "--kv-events", "--http-workers=1", "--api-key=secret")
    with launched(tmp_path, model, *words) as server:
        before = events(server)
        assert before["is_complete"] and [each["kind"] for each in before["events"]] == ["cleared"]
        body = json.dumps({"inputs": "word " * 100, "parameters": {"max_new_tokens": 4}}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer secret"}
        url = f"http://127.0.0.1:{server.port}/generate"
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read()
        after = events(server, f"?after={before['last']}")
        assert not after["is_complete"] and {each["kind"] for each in after["events"]} == {"stored"}
        stored = sum(len(each["token_ids"]) for each in after["events"])
        assert stored >= 96 and stored % after["block_size"] == 0
        assert events(server, f"?after={after['last']}")["events"] == []
        with pytest.raises(urllib.error.HTTPError) as refused:
            events(server, key="another-key-than-that-one")
        assert refused.value.code == 401
        with pytest.raises(urllib.error.HTTPError) as refused:
            events(server, "?after=yesterday")
        assert refused.value.code == 422
