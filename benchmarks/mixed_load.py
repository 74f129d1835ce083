"""A load of all kinds of requests, the answers to compare, and the processes that answer: for chaos.py and soak.py."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import HOST

REQUEST_SECONDS = 180.0
NUM_WORKERS = 2
MAX_NEW_TOKENS = 48
OPTIONS = (f"--http-workers={NUM_WORKERS}", "--max-best-of=4", "--logger-level=error")
PROMPTS = [f"The number {number} is known for" for number in range(3)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 1}},
    "required": ["name", "age"],
}


def generate(prompt: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": MAX_NEW_TOKENS, **parameters}}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """One of each kind for every prompt."""
    found = []
    for seed, prompt in enumerate(PROMPTS):
        sampled = {"do_sample": True, "temperature": 0.8, "seed": seed}
        several = {"prompt": prompt, "max_tokens": MAX_NEW_TOKENS, "n": 2, "temperature": 0.8, "seed": seed}
        messages = [{"role": "user", "content": prompt}]
        chat = {"messages": messages, "max_tokens": MAX_NEW_TOKENS, "stream": True, "logprobs": True, "temperature": 0}
        found += [
            generate(prompt),
            generate(prompt, **sampled, repetition_penalty=1.2, frequency_penalty=0.2),
            generate(prompt, top_n_tokens=3, decoder_input_details=False),
            generate(prompt, grammar={"type": "json", "value": SCHEMA}),
            generate(prompt, stop=["the the", "\n\n\n"]),
            ("/v1/completions", several),
            ("/v1/chat/completions", chat),
        ]
    return found


@dataclass(frozen=True)
class Reply:
    """The texts of all choices, a typed error, or neither if the connection broke off."""

    texts: tuple[str, ...] = ()
    error_type: str | None = None
    broke_off: bool = False
    refused: bool = False
    status: int = 200


def ask(port: int, path: str, body: dict[str, Any]) -> Reply:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError):
            raise
        return Reply(broke_off=True, refused=isinstance(error, ConnectionRefusedError))
    finally:
        connection.close()
    if response.getheader("content-type", "").startswith("text/event-stream"):
        return read_events(data)
    answer = json.loads(data)
    if "error" in answer and "error_type" not in answer:  # as OpenAI says it
        return Reply(error_type=str(answer["error"]["type"]), status=response.status)
    if "error_type" in answer:
        return Reply(error_type=answer["error_type"], status=response.status)
    return Reply(tuple(choice["text"] for choice in answer["choices"]))


def read_events(data: bytes) -> Reply:
    events = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
    parsed = [json.loads(event) for event in events if event != b"[DONE]"]
    if not parsed:
        return Reply(broke_off=True)
    last = parsed[-1]
    if "error_type" in last:
        return Reply(error_type=last["error_type"])
    if "token" in last:  # TGI's stream: the last event has the whole text, which must be that of the tokens
        text = last["generated_text"]
        return Reply(broke_off=True) if text is None else Reply((text,))
    if b"[DONE]" not in events:
        return Reply(broke_off=True)
    return Reply(("".join(event["choices"][0]["delta"].get("content") or "" for event in parsed if event["choices"]),))


def expected_replies(port: int, asked: Sequence[tuple[str, dict[str, Any]]], num_clients: int) -> dict[int, set[Reply]]:
    """Asked twice: what differs without any fault, because sums depend on the neighbours, is nobody's doing."""
    with ThreadPoolExecutor(num_clients) as pool:
        replies = list(pool.map(lambda each: ask(port, *each), [*asked, *asked]))
    return {number: {replies[number], replies[number + len(asked)]} for number in range(len(asked))}


class Server:
    def __init__(self, port: int, launcher: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._launcher = psutil.Process(launcher.pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = {"shard": [], "router": [], "worker": []}
        for child in self._launcher.children(recursive=True):
            try:
                words = child.cmdline()
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
            except psutil.NoSuchProcess:
                continue
            if "serve" in words:
                found["shard"].append(child)
            elif "legato.http.worker" in words:
                found["worker"].append(child)
            elif any(word.startswith("--master-shard-uds-path") for word in words):
                found["router"].append(child)
        return found

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def is_complete(self) -> bool:
        found = self.processes()
        return bool(found["shard"] and found["router"]) and len(found["worker"]) == NUM_WORKERS and self.is_ready()

    def generates(self) -> bool:
        """Whether a token comes. `/readyz` may be 200 for the moment until the router has noticed a shard's death."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS)
        try:
            body = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 1}})
            connection.request("POST", "/generate", body, {"content-type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def all_processes(self) -> dict[str, list[psutil.Process]]:
        return {"launcher": [self._launcher], **self.processes()}

    def memory_mb(self) -> dict[str, float]:
        """Of each role, without what is mapped from files."""
        return {role: sum(map(anonymous_mb, members)) for role, members in self.all_processes().items()}

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=10) as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def anonymous_mb(process: psutil.Process) -> float:
    """Memory of its own, in RAM or swapped out."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(kb) for kb in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE)) * 1024 / 1e6


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
