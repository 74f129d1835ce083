"""Code that comes with a model from the Hub: fetched and run with --trust-remote-code, else left where it is."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from legato.common.errors import UnsupportedModel
from tests.integration.processes import run
from tests.models.test_fallback import fallback, write_own_code

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """One repository, `org/name`, with the files of a folder; remembers which of them were fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fetched: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        files = {file.relative_to(self.server.folder).as_posix(): file for file in self.server.folder.rglob("*.*")}
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": name} for name, file in files.items()
            ]
            body = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in files]  # the tree of older clients
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif name in files:
            body = files[name].read_bytes()
            if with_body:
                self.server.fetched.add(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(write_own_code(tmp_path / "repository", monkeypatch))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def download(hub: Hub, tmp_path: Path, *flags: str) -> Path:
    """As a person does it; the model's folder in the Hub's cache."""
    words = ["download-weights", "org/name", f"--huggingface-hub-cache={tmp_path / 'cache'}", *flags]
    done = run("text-generation-server", *words, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
    assert done.code == 0, done.stderr
    return tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT


def test_code_is_not_even_fetched_without_trust(hub: Hub, tmp_path: Path) -> None:
    snapshot = download(hub, tmp_path)
    assert "model.safetensors" in hub.fetched and not any(name.endswith(".py") for name in hub.fetched)
    with pytest.raises(UnsupportedModel, match="--trust-remote-code runs it"):
        fallback(snapshot)


@pytest.mark.parametrize("is_cached", [False, True])
def test_with_trust_it_comes_along_and_runs_even_where_the_rest_is_cached(
    hub: Hub, tmp_path: Path, is_cached: bool
) -> None:
    if is_cached:
        download(hub, tmp_path)
    snapshot = download(hub, tmp_path, "--trust-remote-code")
    assert "own.py" in hub.fetched
    assert fallback(snapshot, trust_remote_code=True).config.model_type == "brand_new"
