"""The model server and the router as programs of their own, without a launcher. Paths are relative on purpose."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client
from tests.integration.processes import Program

EXAMPLE = Path(__file__).parents[2] / "examples" / "shard_client.py"
Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Program:
            program = Program(tmp_path, name, *arguments)
            stack.callback(program.end)
            return program

        yield start


@pytest.fixture
def shard(start: Start, model: Path) -> Program:
    shard = start("text-generation-server", "serve", str(model), "--uds-path=shard")
    shard.until_logged("Server started")
    return shard


def start_router(start: Start, model: Path, *more: str) -> tuple[Program, Client]:
    port = free_port()
    arguments = [f"--tokenizer-name={model}", "--master-shard-uds-path=shard-0", "--hostname=127.0.0.1"]
    router = start("text-generation-router", f"--port={port}", *arguments, *more)
    router.until_logged("Listening")
    return router, Client(port)


def ask(socket: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(EXAMPLE), f"--socket={socket}", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)


def test_the_example_client_talks_to_a_shard(shard: Program) -> None:
    socket = shard.folder / "shard-0"
    cold = ask(socket)
    assert cold.returncode == 1
    assert cold.stderr == (
        f"--socket {socket}: FAILED_PRECONDITION, the shard is not warmed up yet: call Warmup first\n"
    )
    warm = ask(socket, "--warmup", "--max-new-tokens=5", "--prompt=hello")
    assert (warm.returncode, warm.stderr) == (0, "")
    assert warm.stdout.startswith("a healthy shard: torch.float32 on cpu\n")
    assert warm.stdout.rpartition("\n5 tokens, ")[2] == "FINISH_REASON_LENGTH\n"
    again = ask(socket, "--max-new-tokens=5", "--prompt=hello")
    assert again.stdout == warm.stdout
    shard.send(signal.SIGTERM)
    assert (shard.wait(), shard.stderr) == (0, "")
    assert not socket.exists()


def test_routers_come_and_go_and_the_last_one_loses_its_shard(start: Start, model: Path, shard: Program) -> None:
    router, client = start_router(start, model)
    assert client.get("/health").status == 200
    router.send(signal.SIGTERM)
    assert (router.wait(), router.stderr) == (0, "")

    router, client = start_router(start, model, "--max-restarts=0")
    events = iter(client.stream("a", max_new_tokens=3000, ignore_eos=True))
    next(events)
    shard.send(signal.SIGKILL)
    *_, last = events
    assert last["error_type"] == "generation"
    assert router.wait() == 1
    assert router.stderr.startswith("error: lost shard 0")
    assert router.stderr.count("\n") == 1
