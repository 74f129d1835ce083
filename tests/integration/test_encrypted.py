"""TLS from the launcher's options to an answer, with the real processes."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path

from tests.http.test_tls import certificate, pytestmark
from tests.integration.processes import launched

__all__ = ["certificate", "pytestmark"]


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path, model: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    words = ("--fake", "--http-workers=1", f"--ssl-certfile={cert}", f"--ssl-keyfile={key}")
    with launched(tmp_path, model, *words) as server:
        assert f"Listening on https://127.0.0.1:{server.port}" in server.log
        context = ssl.create_default_context(cafile=cert)
        client = http.client.HTTPSConnection("localhost", server.port, timeout=20, context=context)
        client.request("POST", "/generate", json.dumps({"inputs": "hi", "parameters": {"max_new_tokens": 3}}))
        assert json.load(client.getresponse())["generated_text"]
        client.close()
