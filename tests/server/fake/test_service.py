"""`text-generation-server serve --fake`, as the router sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from legato.common.options import LauncherOptions
from legato.grammar.kinds import Grammar, GrammarKind
from legato.launcher.plan import make_plan
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import write_shape
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.router.shards import GrpcShards, WarmupLimits
from legato.scheduling.state import Admission, StepPlan, StepResult
from legato.server.fake.service import FakeModel, FakeService, StepCost
from legato.server.listening import listen
from tests.generation import generation
from tests.server.silence import silence

MODEL = FakeModel("llama", 300, 512, [2], list(range(10, 200)))
LIMITS = WarmupLimits(None, 128, 64, 512, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("tiny", tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def serving(socket: Path, cost: StepCost = StepCost()) -> AsyncIterator[GrpcShards]:  # noqa: B008 - frozen
    server = await listen(FakeService(MODEL, [f"unix://{socket}"], cost, block_size=4), str(socket))
    shards = await GrpcShards.connect(str(socket))
    try:
        yield shards
    finally:
        await shards.close()
        await server.stop(None)


def first_plan(rows: int, prompt: int = 1) -> StepPlan:
    requests = [generation(row, [5] * prompt, 8) for row in range(rows)]
    admitted = [Admission(request.id, request, request.input_ids, 0, 0, []) for request in requests]
    blocks = [[4 * row + block + 1 for block in range(4)] for row in range(rows)]
    return StepPlan(1, admitted, list(range(rows)), [prompt] * rows, blocks)


async def answers(shards: GrpcShards, plans: list[StepPlan]) -> list[tuple[float, StepResult]]:
    """Send all plans at once; each result with the seconds until it came."""
    await shards.warmup(LIMITS)
    results: list[tuple[float, StepResult]] = []
    all_here = asyncio.Event()

    def on_result(result: StepResult) -> None:
        results.append((time.perf_counter() - started, result))
        if len(results) == len(plans):
            all_here.set()

    running = asyncio.ensure_future(shards.run(on_result))
    await asyncio.sleep(0)
    started = time.perf_counter()
    for plan in plans:
        shards.send(plan)
    await asyncio.wait_for(all_here.wait(), 10)
    running.cancel()
    return results


def decodes(rows: int, steps: int) -> list[StepPlan]:
    first = first_plan(rows)
    return [first, *(StepPlan(n + 2, [], first.rows, [1] * rows, [[] for _ in first.rows]) for n in range(steps - 1))]


def test_info_is_that_of_the_model_but_for_what_is_fake(tmp_path: Path) -> None:
    async def run() -> pb.InfoResponse:
        async with serving(tmp_path / "s-0") as shards:
            assert await shards.healthy()
            return await shards.info()

    info = asyncio.run(run())
    assert (info.device_type, info.dtype) == ("fake", "fake")
    assert (info.model_type, info.vocab_size, info.max_position_embeddings) == ("llama", 300, 512)
    assert (list(info.eos_token_ids), info.block_size, info.use_prefix_caching) == ([2], 4, True)


def test_words_are_tokens_of_text(folder: Path) -> None:
    """The tokenizer of the shape knows 256 bytes and made-up words: bytes above 127 are no text by themselves."""
    model = FakeModel.read(ModelFiles.open(folder))
    assert model.vocab_size == 512 and model.eos_token_ids == [2]
    texts = [ModelFiles.open(folder).tokenizer().decode([token]) for token in model.token_ids]
    assert all(text and text.isascii() for text in texts)
    assert 2 not in model.token_ids and len(texts) > 100


def test_without_a_cost_steps_are_answered_at_once(tmp_path: Path) -> None:
    async def run() -> list[tuple[float, StepResult]]:
        async with serving(tmp_path / "s-0") as shards:
            return await answers(shards, decodes(rows=2, steps=8))

    results = asyncio.run(run())
    assert [result.id for _, result in results] == list(range(1, 9))
    assert all(len(result.token_ids) == len(result.logprobs) == 2 for _, result in results)
    assert all(set(result.token_ids) <= set(MODEL.token_ids) for _, result in results)


def test_steps_take_their_time_one_after_the_other(tmp_path: Path) -> None:
    """20 ms a step and 5 ms a token: two rows make 30 ms, and what waits loses nothing between two steps. They are
    never early. A busy machine may make them late now and then, but not every time."""

    async def run(number: int) -> list[tuple[float, StepResult]]:
        async with serving(tmp_path / f"s-{number}", StepCost(0.020, 0.005)) as shards:
            return await answers(shards, decodes(rows=2, steps=8))

    def is_prompt(number: int) -> bool:
        results = asyncio.run(run(number))
        assert all(seconds >= 0.030 * number for number, (seconds, _) in enumerate(results, 1))
        assert {result.forward_ns for _, result in results} == {30_000_000}
        return results[-1][0] < 0.030 * 8 + 0.1

    assert any(map(is_prompt, range(10)))


def test_a_step_that_breaks_the_contract_is_answered_with_the_reason(tmp_path: Path) -> None:
    async def run() -> list[tuple[float, StepResult]]:
        async with serving(tmp_path / "s-0") as shards:
            stranger = StepPlan(2, [], [7], [1], [[]])
            return await answers(shards, [first_plan(rows=1), stranger])

    results = [result for _, result in asyncio.run(run())]
    assert results[0].error is None
    assert results[1].error == "row 7 computes, but was never admitted"


def test_grammars_are_taken(tmp_path: Path) -> None:
    async def run() -> str:
        async with serving(tmp_path / "s-0") as shards:
            await shards.prepare(Grammar(GrammarKind.REGEX, "[0-9]+"))
            stub = rpc.TextGenerationServiceStub(shards._channels[0])
            answer = await stub.PrepareGrammar(pb.PrepareGrammarRequest(grammar="x", grammar_type=77))
            return str(answer.error)

    assert "77" in asyncio.run(run())


def test_calls_that_need_a_model_are_not_implemented(tmp_path: Path) -> None:
    async def run() -> set[grpc.StatusCode]:
        codes = set()
        async with serving(tmp_path / "s-0") as shards:
            stub = rpc.TextGenerationServiceStub(shards._channels[0])
            calls = [stub.Prefill(pb.PrefillRequest()), stub.Decode(pb.DecodeRequest())]
            for call in [*calls, stub.FilterBatch(pb.FilterBatchRequest())]:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                codes.add(caught.value.code())
            await stub.ClearCache(pb.ClearCacheRequest())
        return codes

    assert asyncio.run(run()) == {grpc.StatusCode.UNIMPLEMENTED}


def test_warmup_grants_what_was_wished_for(tmp_path: Path) -> None:
    async def run() -> pb.WarmupResponse:
        async with serving(tmp_path / "s-0") as shards:
            return await shards.warmup(LIMITS)

    answer = asyncio.run(run())
    assert (answer.num_blocks, answer.max_rows, answer.max_total_tokens, answer.max_input_tokens) == (129, 8, 128, 127)


def test_steps_before_warmup_and_second_routers_are_refused(tmp_path: Path) -> None:
    async def run() -> list[str]:
        words = []
        async with serving(tmp_path / "s-0") as shards:
            stub = rpc.TextGenerationServiceStub(shards._channels[0])
            with pytest.raises(grpc.aio.AioRpcError) as cold:
                await stub.Tokens(silence()).read()
            words.append(cold.value.details())
            await shards.warmup(LIMITS)
            running = asyncio.ensure_future(shards.run(lambda result: None))
            await asyncio.sleep(0.1)
            for call in (stub.Tokens(silence()).read, lambda: stub.Warmup(pb.WarmupRequest())):
                with pytest.raises(grpc.aio.AioRpcError) as second:
                    await call()
                words.append(second.value.details())
            running.cancel()
        return [str(word) for word in words]

    cold, *second = asyncio.run(run())
    assert "Warmup first" in cold
    assert all("is connected to this shard" in words for words in second)


# ---- as a program ---------------------------------------------------------------------------------------------------


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "legato.server.cli", "serve", str(folder), "--fake", f"--uds-path={tmp_path}/s"]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_the_program_serves_without_weights_and_without_torch(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    async def run() -> list[tuple[float, StepResult]]:
        shards = await GrpcShards.connect(f"{tmp_path}/s-0", timeout=30)
        try:
            return await answers(shards, decodes(rows=1, steps=2))
        finally:
            await shards.close()

    assert [result.error for _, result in asyncio.run(run())] == [None, None]
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in libraries and "grpc" in libraries
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert not os.path.exists(f"{tmp_path}/s-0")


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, legato.server.cli, legato.server.fake.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_launcher_passes_its_options_on() -> None:
    plan = make_plan(LauncherOptions(fake=True, fake_step_ms=2.5), ["/tmp/s-0"], {})
    assert {"--fake", "--fake-step-ms=2.5"} <= set(plan.shards[0].words)
    assert not any("fake" in word for word in plan.router.words)


def test_a_cost_without_a_fake_shard_is_refused(folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "legato.server.cli", "serve", str(folder), "--fake-step-ms=1"]
    ended = subprocess.run([*words, f"--uds-path={tmp_path}/s"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: --fake-step-ms, --fake-token-ms and --fake-script are for a fake shard: add --fake\n",
    )
