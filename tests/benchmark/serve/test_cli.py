"""`legato bench serve` against a server that does what a test wants, over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from legato.benchmark.serve.cli import COMMAND
from legato.common.program import run_program

LAST = {"token": {"id": 1}, "generated_text": "x", "details": {"generated_tokens": None}}
FAST = ["--no-tui", "--warmups=0"]
# Longer than anything here takes on a busy machine, and shorter than the loads that a test ends.
PATIENCE = 60.0


@dataclass
class Answer:
    """What the server does with a request: status 200 and tokens, unless said otherwise."""

    num_tokens: int = 4
    status: int = 200
    body: bytes = b""
    first_after: float = 0.0
    gap: float = 0.0
    breaks_off: bool = False  # in the middle of the stream
    closes: bool = False  # the connection, after the answer, without a word about it


@dataclass
class FakeServer:
    answer: Callable[[int], Answer] = lambda number: Answer()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0
    port: int = 0
    loop: asyncio.AbstractEventLoop | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        if path == "/v1/models":
            self._plain(writer, 200, b'{"data":[{"id":"the-model"}]}')
            return True
        length = int(head.partition("content-length:")[2].split()[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.paths.append(path)
        answer = self.answer(len(self.bodies) - 1)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(answer.first_after)
        if answer.status == 200:
            await self._stream(writer, path, answer)
        else:
            self._plain(writer, answer.status, answer.body)
        self.num_open -= 1
        return not (answer.closes or answer.breaks_off)

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    async def _stream(self, writer: asyncio.StreamWriter, path: str, answer: Answer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        events = _events(path, answer.num_tokens)
        for event in events[: len(events) // 2] if answer.breaks_off else events:
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(answer.gap)
        if not answer.breaks_off:
            writer.write(b"0\r\n\r\n")


def _events(path: str, num_tokens: int) -> list[bytes]:
    if path == "/generate_stream":
        return [b'{"token":{"id":1}}'] * (num_tokens - 1) + [json.dumps(LAST).encode()]
    piece = b'"delta":{"content":"a"}' if "chat" in path else b'"text":"a"'
    usage = b'{"choices":[],"usage":{"prompt_tokens":6,"completion_tokens":%d}}' % num_tokens
    return [b'{"choices":[{%b,"finish_reason":null}]}' % piece] * num_tokens + [usage, b"[DONE]"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake, ready, ending = FakeServer(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_server(fake.handle, "127.0.0.1", 0) as listening:
            fake.port, fake.loop = listening.sockets[0].getsockname()[1], asyncio.get_running_loop()
            ready.set()
            await ending.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    yield fake
    assert fake.loop is not None
    fake.loop.call_soon_threadsafe(ending.set)
    thread.join(PATIENCE)


def bench(server: FakeServer, tmp_path: Path, *words: str) -> dict[str, Any]:
    """The results of a run that succeeds."""
    arguments = [f"--url=http://127.0.0.1:{server.port}", *FAST, f"--json={tmp_path}/r.json", *words]
    assert run_program(COMMAND, arguments) == 0
    data: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return data


def only(data: dict[str, Any]) -> dict[str, Any]:
    (found,) = data["results"]
    return dict(found)


def test_a_closed_loop_sends_everything_and_never_more_at_once(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number: Answer(gap=0.002)
    data = bench(server, tmp_path, "-c3", "-n20")
    found = only(data)
    assert (found["num_succeeded"], found["num_failed"], found["num_out"]) == (20, 0, 80)
    assert (len(server.bodies), server.most_open) == (20, 3)
    assert {"date", "command", "commit", "machine", "server", "work"} <= set(data)


def test_the_requests_do_not_depend_on_the_number_of_processes(server: FakeServer, tmp_path: Path) -> None:
    prompts = []
    for processes in (1, 2):
        server.bodies.clear()
        found = only(bench(server, tmp_path, "-c4", "-n12", "--input-spread=0.5", f"--processes={processes}"))
        assert found["processes"] == processes
        prompts.append(sorted(json.dumps(body) for body in server.bodies))
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == 12


def test_times_are_those_that_the_server_took(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number: Answer(num_tokens=6, first_after=0.3, gap=0.1)
    found = only(bench(server, tmp_path, "-c3", "-n6", "--slo-ttft=275"))
    assert 300 <= found["ttft_ms"]["p50"] < 450
    assert 95 <= found["itl_ms"]["mean"] < 150
    assert 775 <= found["latency_ms"]["p50"] < 1150
    assert (found["goodput"], found["good_share"]) == (0, 0)


def test_an_open_loop_does_not_wait_for_the_server(server: FakeServer, tmp_path: Path) -> None:
    """Thirty in about a third of a second, though each takes longer than that by itself: together it would be 24 s."""
    server.answer = lambda number: Answer(first_after=0.8)
    found = only(bench(server, tmp_path, "--rate=100", "-n30"))
    assert (found["num_succeeded"], found["rate"], found["concurrency"]) == (30, 100, None)
    assert server.most_open > 15
    assert found["seconds"] < 4


def test_a_duration_ends_the_load(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number: Answer(first_after=0.1)
    found = only(bench(server, tmp_path, "-c2", "--duration=2"))
    assert 1.9 < found["seconds"] < 3
    assert 20 <= found["num_succeeded"] <= 40


def test_several_levels_are_measured_one_after_the_other(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Slow enough that the client has little to do, of which it would warn below the table.
    server.answer = lambda number: Answer(first_after=0.05)
    data = bench(server, tmp_path, "-c1,2", "-n4")
    assert [each["load"] for each in data["results"]] == ["1 at once", "2 at once"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and [lines[number].split("|")[1].strip() for number in (3, 10)] == ["2 at once"] * 2


def test_errors_are_counted_by_kind_and_shown(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [Answer(), Answer(status=429, body=b'{"error":"Model is overloaded"}'), Answer(breaks_off=True)]
    server.answer = lambda number: answers[number % 3]
    found = only(bench(server, tmp_path, "-c1", "-n9"))
    kinds = {kind: failures["count"] for kind, failures in found["failures"].items()}
    assert (found["num_succeeded"], kinds) == (3, {"HTTP 429": 3, "connection lost": 3})
    assert "3 × HTTP 429, such as: Model is overloaded" in capsys.readouterr().out


def test_a_request_that_takes_too_long_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number: Answer(first_after=10.0 if number == 0 else 0.0)
    found = only(bench(server, tmp_path, "-c1", "-n3", "--timeout=1"))
    assert (found["num_succeeded"], found["failures"]["timeout"]["count"]) == (2, 1)


def test_connections_are_used_again(server: FakeServer, tmp_path: Path) -> None:
    bench(server, tmp_path, "-c2", "-n12")
    assert server.num_connections == 2


def test_a_connection_that_was_closed_while_idle_is_no_error(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number: Answer(closes=True)
    found = only(bench(server, tmp_path, "-c2", "-n12"))
    assert (found["num_succeeded"], server.num_connections) == (12, 12)


@pytest.mark.parametrize(
    ("api", "path", "field"),
    [("completions", "/v1/completions", "prompt"), ("chat", "/v1/chat/completions", "messages")],
)
def test_openais_routes_get_what_they_expect(
    server: FakeServer, tmp_path: Path, api: str, path: str, field: str
) -> None:
    extra = '--extra-body={"top_p": 0.5}'
    data = bench(server, tmp_path, f"--api={api}", "-c1", "-n2", "--output-len=9", extra)
    body = server.bodies[0]
    assert server.paths == [path] * 2
    assert (body["model"], body["max_tokens"], body["stream"], body["top_p"]) == ("the-model", 9, True, 0.5)
    assert body[field]
    assert (only(data)["num_out"], only(data)["num_in"], data["server"]["model"]) == (8, 12, "the-model")


def test_tgi_gets_what_it_expects(server: FakeServer, tmp_path: Path) -> None:
    bench(server, tmp_path, "-c1", "-n1", "--input-len=10", "--output-len=9", "--no-ignore-eos")
    (body,) = server.bodies
    assert body["parameters"] == {"max_new_tokens": 9, "ignore_eos": False, "details": True, "truncate": 10}
    assert len(body["inputs"].split()) == 10


def test_a_dataset_says_what_is_sent(server: FakeServer, tmp_path: Path) -> None:
    lines = [{"prompt": "one", "output_len": 3, "id": 7}, {"prompt": "two"}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    bench(server, tmp_path, f"--dataset={tmp_path}/d.jsonl", "-c1", "-n3", "--output-len=5")
    sent = [(body["inputs"], body["parameters"]["max_new_tokens"]) for body in server.bodies]
    assert sent == [("one", 3), ("two", 5), ("one", 3)]


def test_warm_ups_are_not_counted(server: FakeServer, tmp_path: Path) -> None:
    found = only(bench(server, tmp_path, "-c1", "-n2", "--warmups=3"))
    assert (found["num_succeeded"], len(server.bodies)) == (2, 5)


def test_keys_stay_out_of_the_results(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["legato", "bench", "serve", "--api-key=geheim"])
    bench(server, tmp_path, "-c1", "-n1", "--api-key=geheim")
    assert "geheim" not in (tmp_path / "r.json").read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {PATIENCE:g} seconds"
        time.sleep(0.02)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_program(COMMAND, ["--no-tui", *words]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-c1", "-r1"], "give only one"),
        (["-c0"], "--concurrency 0: it must be more than 0"),
        (["-r0"], "--rate 0: it must be more than 0"),
        (["--url=localhost:3000"], "must look like http://host:port"),
        (["--url=http://localhost:port"], "the port must be a number"),
        (["--extra-body=[1]"], "--extra-body"),
        (["--dataset=/nowhere"], "--dataset /nowhere: No such file"),
        (["--json=/nowhere/r.json"], "--json /nowhere/r.json"),
        (["--url=http://127.0.0.1:1"], "cannot connect"),
        (["--url=http://127.0.0.1:1", "--api=chat"], "/v1/models"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert expected in failure(capsys, *words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"}', "line 2: Object missing required field `prompt`"),
        ('{"prompt": "x", "output_len": 0}', "line 2: the prompt is empty or output_len is less than 1"),
        ('{"prompt": [1, 2]}', "line 2: only --api completions takes prompts of token ids"),
        ("nonsense", "line 2: JSON is malformed"),
    ],
)
def test_a_wrong_line_of_a_dataset_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "fine"}\n' + line)
    assert expected in failure(capsys, f"--dataset={tmp_path}/d.jsonl")


def test_a_server_that_refuses_ends_it_before_the_load(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda number: Answer(status=404, body=b"not here")
    assert "HTTP 404: not here" in failure(capsys, f"--url=http://127.0.0.1:{server.port}")
    assert len(server.bodies) == 1


def test_a_load_without_a_single_success_is_a_failure(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda number: Answer(status=500)
    words = [f"--url=http://127.0.0.1:{server.port}", "--warmups=0", "-c1", "-n2"]
    assert "no request succeeded" in failure(capsys, *words)


def test_an_interrupted_load_shows_what_there_is(server: FakeServer) -> None:
    server.answer = lambda number: Answer(first_after=0.02)
    words = [sys.executable, "-m", "legato.cli", "bench", "serve", f"--url=http://127.0.0.1:{server.port}", *FAST]
    running = subprocess.Popen([*words, "-c1", "--duration=600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(server.bodies) > 50)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, err.strip()) == (130, b"")
    assert b"| 1 at once |" in out


def test_processes_of_a_command_that_was_killed_do_not_outlive_it(server: FakeServer) -> None:
    server.answer = lambda number: Answer(first_after=0.02)
    words = [sys.executable, "-m", "legato.cli", "bench", "serve", f"--url=http://127.0.0.1:{server.port}", *FAST]
    running = subprocess.Popen([*words, "-c1", "--duration=600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(server.bodies) > 5)
    running.kill()
    out, err = running.communicate(timeout=PATIENCE)  # until the last process that could write has ended
    assert (out, err) == (b"", b"")
