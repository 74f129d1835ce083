"""What a shard's callers see when memory runs out, and that captures wait until nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.server import service as service_module
from legato.server.loading import LoadedModel
from legato.server.model import Model
from legato.server.service import TextGenerationService
from tests.server.faults import Faults, record
from tests.server.shard import OPTIONS, Log, finish, load_model, prefill, refusal, request, serving, warmup
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_llama(tmp_path_factory.mktemp("llama")))


def failing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """From now on, so many forwards find no memory."""
    faults = Faults()
    faults.arm("forward", 1, times=times)
    monkeypatch.setattr(loaded.model, "forward", faults.before("forward", loaded.model.forward))


def step(step_id: int, row: int, block: int) -> pb.StepRequest:
    admission = pb.Admission(row=row, request_id=step_id, input_ids=pack_token_ids([5, 6, 7]))
    return pb.StepRequest(
        id=step_id, admitted=[admission], rows=[row], num_tokens=[3], num_new_blocks=[1], new_blocks=[block]
    )


def test_a_step_without_memory_is_an_answer_and_the_stream_goes_on(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps() -> AsyncIterator[pb.StepRequest]:
        for number in (1, 2):
            yield step(number, row=number, block=number)

    async def conversation() -> list[pb.StepResponse]:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup())
            failing(loaded, monkeypatch, times=3)  # step 1 whole and its first token alone; then step 2 whole
            answers = [answer async for answer in shard.Tokens(steps())]
            failing(loaded, monkeypatch, times=100)
            return answers + [answer async for answer in shard.Tokens(steps())]

    answers = asyncio.run(conversation())
    assert answers[0].error.startswith("Out of memory: a step of 3 tokens in 1 rows does not fit; lower ")
    assert not answers[1].HasField("error") and len(answers[1].token_ids) == 1
    assert answers[3].HasField("error")


def test_a_unary_call_without_memory_is_refused_and_leaves_no_row_behind(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conversation() -> tuple[grpc.StatusCode, Log]:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup(max_rows=1))
            with monkeypatch.context() as patched:
                failing(loaded, patched, times=100)
                code, _ = await refusal(shard.Prefill(prefill(1, request(1, [5, 6, 7], 4))))
            log = Log()
            await finish(shard, log, log.add(await shard.Prefill(prefill(2, request(2, [5, 6, 7], 4)))))
            return code, log

    code, log = asyncio.run(conversation())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(log.tokens[2]) == 4


def test_sizes_are_captured_one_by_one_while_nobody_asks(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "IDLE_SECONDS", 0.005)
    captured: list[tuple[int, bool]] = []

    async def conversation() -> None:
        service = TextGenerationService(Model(loaded, OPTIONS), [])
        engine = service._model
        engine.warmup(warmup(max_rows=3))
        engine.engine.use_graphs((), record(Faults()))
        graphs = engine.engine.graphs
        assert graphs is not None
        decodes, _ = graphs.kinds
        capture = decodes.capture
        decodes.capture = lambda size: (captured.append((size, busy)), capture(size))[1]  # type: ignore[method-assign]
        busy, service._in_flight = True, 1
        task = asyncio.create_task(service._capture_while_idle(graphs))
        await asyncio.sleep(0.05)
        busy, service._in_flight = False, 0
        await asyncio.wait_for(task, 5)
        await service.stop()

    asyncio.run(conversation())
    assert captured == [(1, False), (2, False), (3, False)]
