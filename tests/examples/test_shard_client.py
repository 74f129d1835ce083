"""The shard client's whole conversation, with a shard that speaks from a script."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import shard_client

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc

EXAMPLE = Path(__file__).parents[2] / "examples" / "shard_client.py"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ScriptedShard(rpc.TextGenerationServiceServicer):
    """Says one entry of `script` per forward: the texts of its tokens, none for a prompt that needs more time.
    Every forward caches the batch under a new id, and an id that it does not know is an error. Records all calls."""

    def __init__(self, script: list[list[str]], fail_at: str | None = None, hang_at: str | None = None) -> None:
        self.script = script
        self.fail_at = fail_at
        self.hang_at = hang_at
        self.calls: list[str] = []
        self.requests: dict[str, Any] = {}
        self.num_forwards = 0
        self.cached: set[int] = set()

    async def _receive(self, name: str, request: Any, context: Context) -> None:
        self.calls.append(name)
        self.requests[name] = request
        if name == self.fail_at:
            await context.abort(grpc.StatusCode.INTERNAL, "out of paper")
        if name == self.hang_at:
            await asyncio.sleep(60)

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        await self._receive("Info", request, context)
        return pb.InfoResponse(dtype="float32", device_type="cpu")

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        await self._receive("Health", request, context)
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        await self._receive("Warmup", request, context)
        return pb.WarmupResponse(max_supported_total_tokens=4096)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        await self._receive("Prefill", request, context)
        generations, batch = self._forward()
        return pb.PrefillResponse(generations=generations, batch=batch)

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        await self._receive("Decode", request, context)
        if {batch.id for batch in request.batches} != self.cached:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown batch")
        generations, batch = self._forward()
        return pb.DecodeResponse(generations=generations, batch=batch)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        await self._receive("ClearCache", request, context)
        if request.HasField("id") and request.id not in self.cached:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown batch")
        self.cached.clear()
        return pb.ClearCacheResponse()

    def _forward(self) -> tuple[list[pb.Generation], pb.CachedBatch | None]:
        texts = self.script[self.num_forwards]
        self.num_forwards += 1
        self.cached = {self.num_forwards} if self.num_forwards < len(self.script) else set()
        generation = pb.Generation(tokens=pb.Tokens(texts=texts, ids=[7] * len(texts)))
        if self.cached:
            return ([generation] if texts else []), pb.CachedBatch(id=self.num_forwards, request_ids=[0], size=1)
        whole = [text for texts in self.script for text in texts]
        generation.generated_text.CopyFrom(
            pb.GeneratedText(text="".join(whole), generated_tokens=len(whole), finish_reason="FINISH_REASON_EOS_TOKEN")
        )
        return [generation], None


@asynccontextmanager
async def listening(shard: ScriptedShard, socket: Path) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rpc.add_TextGenerationServiceServicer_to_server(shard, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), *arguments, stdout=PIPE, stderr=PIPE)


async def outcome(process: Process) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error."""
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def run(shard: ScriptedShard, folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """The example as a person runs it, in a process of its own."""

    async def conversation() -> tuple[int | None, str, str]:
        socket = folder / "shard-0"
        async with listening(shard, socket):
            return await outcome(await start("--socket", str(socket), *arguments))

    return asyncio.run(conversation())


def test_the_tokens_are_printed_and_counted(tmp_path: Path) -> None:
    shard = ScriptedShard([["Once"], [" upon"], [" a"], [" time"]])
    code, out, err = run(shard, tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "a healthy shard: float32 on cpu",
        "Once upon a time",
        "4 tokens, FINISH_REASON_EOS_TOKEN",
    ]


def test_the_calls_come_in_order(tmp_path: Path) -> None:
    shard = ScriptedShard([["a"], ["b"], ["c"]])
    run(shard, tmp_path)
    assert shard.calls == ["Info", "Health", "Prefill", "Decode", "Decode", "ClearCache"]


def test_a_generation_of_one_token_needs_no_decode(tmp_path: Path) -> None:
    shard = ScriptedShard([["end"]])
    run(shard, tmp_path)
    assert shard.calls == ["Info", "Health", "Prefill", "ClearCache"]


def test_warmup_comes_before_prefill_when_asked_for(tmp_path: Path) -> None:
    shard = ScriptedShard([["end"]])
    run(shard, tmp_path, "--warmup")
    assert shard.calls == ["Info", "Health", "Warmup", "Prefill", "ClearCache"]
    assert shard.requests["Warmup"].max_prefill_tokens > 0


def test_a_forward_may_bring_no_token_or_several(tmp_path: Path) -> None:
    """No token while a long prompt is computed in chunks, several when the shard guessed ahead."""
    shard = ScriptedShard([[], ["Good", " morning"], ["!"]])
    _, out, _ = run(shard, tmp_path)
    assert "Good morning!\n3 tokens" in out


def test_the_options_reach_the_shard(tmp_path: Path) -> None:
    shard = ScriptedShard([["end"]])
    run(shard, tmp_path, "--prompt", "Tell me", "--max-new-tokens", "3")
    batch = shard.requests["Prefill"].batch
    (request,) = batch.requests
    assert batch.size == 1
    assert request.inputs == request.input_chunks.chunks[0].text == "Tell me"
    assert request.stopping_parameters.max_new_tokens == 3


def test_nothing_is_filtered_or_penalised(tmp_path: Path) -> None:
    shard = ScriptedShard([["end"]])
    run(shard, tmp_path)
    chosen = shard.requests["Prefill"].batch.requests[0].parameters
    assert (chosen.temperature, chosen.top_p, chosen.typical_p, chosen.repetition_penalty) == (1, 1, 1, 1)
    assert not chosen.do_sample


@pytest.mark.parametrize("call", ["Prefill", "Decode"])
def test_a_failing_shard_is_one_line_and_is_left_clean(tmp_path: Path, call: str) -> None:
    shard = ScriptedShard([["a"], ["b"]], fail_at=call)
    code, _, err = run(shard, tmp_path)
    assert (code, err) == (1, f"--socket {tmp_path}/shard-0: INTERNAL, out of paper\n")
    assert shard.calls[-1] == "ClearCache"
    assert not shard.cached


def test_an_interrupted_client_leaves_the_shard_clean(tmp_path: Path) -> None:
    shard = ScriptedShard([["a"], ["b"]], hang_at="Decode")

    async def conversation() -> tuple[int | None, str, str]:
        async with listening(shard, tmp_path / "shard-0"):
            process = await start("--socket", f"{tmp_path}/shard-0")
            async with asyncio.timeout(60):
                while "Decode" not in shard.calls:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            return await outcome(process)

    code, _, err = asyncio.run(conversation())
    assert (code, err) == (130, "")
    assert shard.calls[-1] == "ClearCache"
    assert not shard.cached


def test_a_missing_socket_is_one_line() -> None:
    async def conversation() -> tuple[int | None, str, str]:
        return await outcome(await start("--socket", "/nowhere/shard-0"))

    code, _, err = asyncio.run(conversation())
    assert code == 1
    assert err.startswith("--socket /nowhere/shard-0: UNAVAILABLE")
    assert "Traceback" not in err


@pytest.mark.parametrize("number", ["0", "-1", "5000000000"])
def test_an_impossible_number_of_tokens_is_refused_by_name(number: str) -> None:
    async def conversation() -> tuple[int | None, str, str]:
        return await outcome(await start("--max-new-tokens", number))

    code, _, err = asyncio.run(conversation())
    assert code == 2
    assert "--max-new-tokens must lie between" in err


def test_every_call_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option, config = shard_client.DEADLINE
    monkeypatch.setattr(shard_client, "DEADLINE", (option, config.replace("300s", "0.2s")))
    shard = ScriptedShard([["a"]], hang_at="Health")

    async def conversation() -> None:
        async with listening(shard, tmp_path / "shard-0"):
            await shard_client.converse(f"{tmp_path}/shard-0", "Hi", 1, warmup=False)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(conversation())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
