"""An HTTP client with nothing in it that could hide what the server sent: the standard library and a few words."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]
TIMEOUT = 120.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class EventStream:
    """An answer of server-sent events, read one at a time."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def frames(self) -> Iterator[bytes]:
        """What stands between empty lines, byte for byte."""
        lines: list[bytes] = []
        while line := self._response.readline():
            if line != b"\n":
                lines.append(line)
            else:
                yield b"".join(lines)
                lines = []
        assert not lines, f"the stream broke off in {lines}"

    def __iter__(self) -> Iterator[JSON]:
        """The events. Comments keep the connection alive while nothing else is sent."""
        for frame in self.frames():
            if frame != b":\n":
                assert frame.startswith(b"data:"), frame
                yield json.loads(frame[5:])

    def hang_up(self) -> None:
        """Leave without a word: the connection is reset, as when a client dies."""
        if self._response.fp is not None:
            self._response.close()
        self._connection.close()


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> Answer:
        return self._request("GET", path)

    def post(self, path: str, body: JSON | bytes) -> Answer:
        return self._request("POST", path, body)

    def generate(self, inputs: str, **parameters: Any) -> JSON:
        answer = self.post("/generate", {"inputs": inputs, "parameters": parameters})
        assert answer.status == 200, answer.body
        found: JSON = answer.json()
        return found

    def stream(self, inputs: str, **parameters: Any) -> EventStream:
        connection = self._connect()
        body = json.dumps({"inputs": inputs, "parameters": parameters})
        connection.request("POST", "/generate_stream", body)
        return EventStream(connection, connection.getresponse())

    def send(self, path: str, inputs: str, *, cut: int = 0, **parameters: Any) -> socket.socket:
        """A request on its way, without the last `cut` bytes. Whoever closes the socket has hung up."""
        body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        connection.sendall(head + body[: len(body) - cut])
        return connection

    def metric(self, name: str) -> float:
        """One number of /metrics; labels are part of the name."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").body.decode(), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def _request(self, method: str, path: str, body: JSON | bytes | None = None) -> Answer:
        connection = self._connect()
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)


def text_of(events: list[JSON]) -> str:
    """What the tokens say together; special ones have a name and no text."""
    return "".join(event["token"]["text"] for event in events if not event["token"]["special"])


def at_once(calls: list[Any]) -> list[Any]:
    """Run all calls at the same time, each on a thread; their answers in the same order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
