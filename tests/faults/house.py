"""Real processes with keys and tokens that must not leak, a small limit for bodies, and sockets without manners."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from legato.common.sockets import free_port
from tests.integration.processes import Program
from tests.tiny_models import tiny_llama

API_KEY = "canary-api-key-5f1c"
HUB_TOKEN = "hf_canaryHubToken7d2e"
PAYLOAD_LIMIT = 200_000
TIMEOUT = 20.0
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
AUTHORIZED = f"Authorization: Bearer {API_KEY}\r\n".encode()


@dataclass
class Received:
    """What came back over one connection until it was closed or nothing more came."""

    data: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        """Of all answers, for the first of which one request was sent."""
        return [int(part[:3]) for part in self.data.split(b"HTTP/1.1 ")[1:]]


class House:
    def __init__(self, program: Program, port: int) -> None:
        self.program = program
        self.port = port

    @property
    def everything_said(self) -> str:
        return self.program.log + self.program.stderr

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT)

    def routers(self) -> list[psutil.Process]:
        """All processes that may read requests."""
        family = psutil.Process(self.program.process.pid).children(recursive=True)
        return [process for process in family if "serve" not in process.cmdline()]

    def bytes_read(self) -> int:
        """By the routers so far, from sockets and files alike."""
        return sum(process.io_counters().read_chars for process in self.routers())

    def ask(self, head: bytes, *pieces: bytes, key: bool = True) -> Received:
        """Sends whatever it can, reads whatever comes."""
        with self.connect() as connection:
            try:
                connection.sendall(head + (AUTHORIZED if key else b"") + b"Host: localhost\r\n\r\n")
                for piece in pieces:
                    connection.sendall(piece)
            except OSError:
                pass  # closed by the other side, which is an answer too
            return self.rest_of(connection)

    def rest_of(self, connection: socket.socket) -> Received:
        return _received(connection)


def _received(connection: socket.socket) -> Received:
    """What is answered may take its time on a busy machine. After that a second's silence means that all has come."""
    connection.settimeout(TIMEOUT)
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
            connection.settimeout(1.0)
    except TimeoutError:
        return Received(data, closed=False)
    except ConnectionError:
        pass
    return Received(data, closed=True)


@contextmanager
def open_house(folder: Path) -> Iterator[House]:
    port = free_port()
    model = tiny_llama(folder / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    program = Program(
        folder,
        "text-generation-launcher",
        f"--model-id={model}",
        "--hostname=127.0.0.1",
        f"--port={port}",
        f"--shard-uds-path={folder / 'shard'}",
        f"--payload-limit={PAYLOAD_LIMIT}",
        "--logger-level=trace",
        "--json-output",
        API_KEY=API_KEY,
        HF_TOKEN=HUB_TOKEN,
    )
    try:
        program.until_logged("Listening on")
        yield House(program, port)
    finally:
        program.end()
