"""The shards as the router sees them: found through their sockets, told the same, heard in order, missed when gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from legato.common.errors import EndpointInUse
from legato.common.sockets import is_answered
from legato.grammar.kinds import Grammar, GrammarKind
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.pb import unpack_token_ids
from legato.router.answers import MAX_BEHIND, StepAnswers
from legato.router.peer import PeerProcess
from legato.router.shards import GrpcShards, ShardsLost, WarmupLimits
from legato.scheduling.state import Admission, StepPlan, StepResult
from tests.generation import generation, sampling

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
LIMITS = WarmupLimits(None, None, 64, None, 8)


class Shard(rpc.TextGenerationServiceServicer):
    """Writes down what it is told. Answers each step with a token that is its id, and `rank` as its logprob."""

    def __init__(
        self, urls: list[str], rank: int = 0, num_blocks: int = 9, num_answers: int = 1000, num_steps: int = 0
    ) -> None:
        self._urls = urls
        self._rank = rank
        self._num_blocks = num_blocks
        self._num_answers = num_answers
        self._num_steps = num_steps
        self.steps: list[pb.StepRequest] = []
        self.num_questions = 0

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        return pb.HealthResponse()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        self.num_questions += 1
        return pb.InfoResponse(block_size=16, num_steps=self._num_steps)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        self.num_questions += 1
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        if self._num_blocks == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no room for a single block")
        return pb.WarmupResponse(num_blocks=self._num_blocks, max_rows=request.max_rows)

    async def Tokens(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: Context
    ) -> AsyncIterator[pb.StepResponse]:
        async for step in request_iterator:
            if len(self.steps) == self._num_answers:
                return
            self.steps.append(step)
            yield pb.StepResponse(id=step.id, token_ids=[step.id], logprobs=[self._rank])


@asynccontextmanager
async def listening(socket: Path, shard: Shard) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server()
    rpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]  # generated
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(folder: Path, *changes: dict[str, int]) -> AsyncIterator[tuple[GrpcShards, list[Shard]]]:
    """As many shards as `changes`, and the router's view of them."""
    sockets = [folder / f"shard-{rank}" for rank in range(len(changes))]
    urls = [f"unix://{socket}" for socket in sockets]
    told = [Shard(urls, rank, **change) for rank, change in enumerate(changes)]
    async with AsyncExitStack() as stack:
        for socket, shard in zip(sockets, told, strict=True):
            await stack.enter_async_context(listening(socket, shard))
        shards = await GrpcShards.connect(str(sockets[0]), timeout=10)
        stack.push_async_callback(shards.close)
        yield shards, told


class SilentShard(Shard):
    """Answers `Health` until it is connected, and then nothing."""

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        if self.num_questions:
            await asyncio.sleep(60)
        return pb.HealthResponse()

    async def PrepareGrammar(self, request: pb.PrepareGrammarRequest, context: Context) -> pb.PrepareGrammarResponse:
        await asyncio.sleep(60)
        return pb.PrepareGrammarResponse()


def plan(number: int, **changes: Any) -> StepPlan:
    return StepPlan(number, **{"admitted": [], "rows": [3], "num_tokens": [1], "new_blocks": [[]], **changes})


async def results_of(shards: GrpcShards, told: list[Shard], plans: list[StepPlan]) -> list[StepResult]:
    """Send the plans; wait for as many results, and until the slowest shard has heard of them all."""
    results: list[StepResult] = []
    stream = asyncio.create_task(shards.run(results.append))
    await asyncio.sleep(0)
    for each in plans:
        shards.send(each)
    async with asyncio.timeout(10):
        while min(len(results), *(len(shard.steps) for shard in told)) < len(plans):
            await asyncio.sleep(0.001)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return results


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket to another user")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_of_another_user_is_told_nothing(tmp_path: Path, rank: int) -> None:
    sockets = [tmp_path / f"shard-{each}" for each in range(2)]
    shards = [Shard([f"unix://{socket}" for socket in sockets]) for _ in sockets]

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            for socket, shard in zip(sockets, shards, strict=True):
                await stack.enter_async_context(listening(socket, shard))
            os.chown(sockets[rank], 65534, 65534)
            with pytest.raises(EndpointInUse, match=r"another user.*--master-shard-uds-path"):
                await GrpcShards.connect(str(sockets[0]), timeout=10)

    asyncio.run(scenario())
    assert not shards[rank].steps and shards[rank].num_questions == 0


# ---- finding them ---------------------------------------------------------------------------------------------------


def test_the_first_shard_is_waited_for_and_names_the_others(tmp_path: Path) -> None:
    urls = [f"unix://{tmp_path}/shard-{rank}" for rank in range(2)]

    async def run() -> bool:
        waiting = asyncio.create_task(GrpcShards.connect(f"{tmp_path}/shard-0", timeout=10))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        async with listening(tmp_path / "shard-0", Shard(urls)), listening(tmp_path / "shard-1", Shard(urls, 1)):
            shards = await waiting
            healthy = await shards.healthy()
            await shards.close()
            return healthy

    assert asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_ends_as_soon_as_it_answered_is_lost_like_any_other(tmp_path: Path, rank: int) -> None:
    """Its launcher has removed the socket. In a recovery this must not end the router, with all its requests."""
    sockets = [tmp_path / f"shard-{each}" for each in range(2)]
    urls = [f"unix://{each}" for each in sockets]

    class ShortLived(Shard):
        async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
            sockets[rank].unlink(missing_ok=True)
            return pb.HealthResponse()

    async def main() -> None:
        shards = [ShortLived(urls, each) if each == rank else Shard(urls, each) for each in range(2)]
        async with listening(sockets[0], shards[0]), listening(sockets[1], shards[1]):
            with pytest.raises(ShardsLost, match=f"shard-{rank} ended as soon as it answered"):
                await GrpcShards.connect(str(sockets[0]), timeout=10)

    asyncio.run(main())


def test_shards_that_are_out_of_step_are_not_used(tmp_path: Path) -> None:
    """A router died after it had sent a step to the first of them."""

    async def run() -> None:
        async with connected(tmp_path, {"num_steps": 7}, {"num_steps": 7}) as (shards, told):
            assert await shards.are_in_step()
            told[0]._num_steps += 1
            assert not await shards.are_in_step()
            with pytest.raises(ShardsLost, match="no shard responds"):
                await GrpcShards.connect(f"{tmp_path}/shard-0", timeout=0.5)

    asyncio.run(run())


def test_the_process_of_a_shard_is_known_by_its_socket_and_killed(tmp_path: Path) -> None:
    code = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('{tmp_path}/s'); s.listen(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not is_answered(f"{tmp_path}/s"):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        peer = PeerProcess(f"{tmp_path}/s")
        assert peer.pid == process.pid
        peer.kill()
        assert process.wait(10) == -signal.SIGKILL
        peer.kill()
        peer.close()


def test_nobody_listens_on_a_socket(tmp_path: Path) -> None:
    peer = PeerProcess(f"{tmp_path}/nothing")
    assert peer.pid is None
    peer.kill()
    peer.close()


def test_shards_that_fall_silent_in_warm_up_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.router.shards.HEALTH_INTERVAL", 0.01)
    silent = asyncio.Event()

    class Hung(Shard):
        async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
            if silent.is_set():
                await asyncio.sleep(60)
            return pb.HealthResponse()

        async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
            await asyncio.sleep(1.0)  # long, and asked several times in between
            if silent.is_set():
                await asyncio.sleep(60)
            return pb.WarmupResponse(num_blocks=9, max_rows=request.max_rows)

    async def run() -> None:
        async with listening(tmp_path / "shard-0", Hung([f"unix://{tmp_path}/shard-0"])):
            shards = await GrpcShards.connect(f"{tmp_path}/shard-0", timeout=10, hang_timeout=0.5)
            assert (await shards.warmup(LIMITS)).num_blocks == 9
            silent.set()
            with pytest.raises(ShardsLost, match="have not responded for"):
                await shards.warmup(LIMITS)
            await shards.close()

    asyncio.run(run())


def test_a_hung_shard_that_is_killed_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.router.shards.HEALTH_SECONDS", 0.5)
    events: list[str] = []

    class Peer(PeerProcess):
        def kill(self) -> None:
            events.append("killed")

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr("legato.router.shards.PeerProcess", Peer)

    class Hung(Shard):
        async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
            await asyncio.sleep(0 if "killed" in events else 60)
            return pb.HealthResponse()

    async def run() -> list[str]:
        async with listening(tmp_path / "shard-0", Hung([f"unix://{tmp_path}/shard-0"])):
            shards = await GrpcShards.connect(f"{tmp_path}/shard-0", timeout=10, hang_timeout=0.6)
            before = list(events)
            await shards.close()
            return before

    assert asyncio.run(run()) == ["killed", "closed"]


def test_a_relative_path_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run() -> int:
        async with listening(tmp_path / "shard-0", Shard([f"unix://{tmp_path}/shard-0"])):
            shards = await GrpcShards.connect("shard-0", timeout=10)
            block_size = (await shards.info()).block_size
            await shards.close()
            return block_size

    assert asyncio.run(run()) == 16


def test_a_shard_that_never_comes_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(ShardsLost, match="no shard responds on"):
        asyncio.run(GrpcShards.connect(f"{tmp_path}/shard-0", timeout=0.2))


def test_the_smallest_shard_is_the_limit(tmp_path: Path) -> None:
    async def run() -> int:
        async with connected(tmp_path, {"num_blocks": 30}, {"num_blocks": 20}) as (shards, _):
            return (await shards.warmup(LIMITS)).num_blocks

    assert asyncio.run(run()) == 20


def test_a_refusal_to_warm_up_keeps_its_words(tmp_path: Path) -> None:
    async def run() -> None:
        async with connected(tmp_path, {}, {"num_blocks": 0}) as (shards, _):
            with pytest.raises(ShardsLost, match=r"^no room for a single block$"):
                await shards.warmup(LIMITS)

    asyncio.run(run())


# ---- driving them ---------------------------------------------------------------------------------------------------


def test_every_plan_goes_to_every_shard_and_the_first_ones_answers_count(tmp_path: Path) -> None:
    async def run() -> tuple[list[StepResult], list[Shard]]:
        async with connected(tmp_path, {}, {}) as (shards, told):
            return await results_of(shards, told, [plan(number) for number in range(1, 6)]), told

    results, told = asyncio.run(run())
    assert [(result.id, result.token_ids, result.logprobs) for result in results] == [
        (number, [number], [0.0]) for number in range(1, 6)
    ]
    assert [step.id for step in told[0].steps] == [step.id for step in told[1].steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_ends_its_stream_is_lost(tmp_path: Path, rank: int) -> None:
    changes: list[dict[str, int]] = [{}, {}]
    changes[rank] = {"num_answers": 2}

    async def run() -> None:
        async with connected(tmp_path, *changes) as (shards, _):
            stream = asyncio.create_task(shards.run(lambda result: None))
            await asyncio.sleep(0)
            for number in range(1, 5):
                shards.send(plan(number))
            with pytest.raises(ShardsLost, match=f"shard {rank} ended its stream"):
                await asyncio.wait_for(stream, 10)

    asyncio.run(run())


def test_a_shard_that_dies_is_lost_and_unhealthy(tmp_path: Path) -> None:
    async def run() -> None:
        async with listening(tmp_path / "shard-0", Shard([f"unix://{tmp_path}/shard-0"])) as server:
            shards = await GrpcShards.connect(f"{tmp_path}/shard-0", timeout=10)
            stream = asyncio.create_task(shards.run(lambda result: None))
            await asyncio.sleep(0.05)
            await server.stop(None)
            with pytest.raises(ShardsLost, match="lost shard 0"):
                await asyncio.wait_for(stream, 10)
            assert not await shards.healthy(timeout=0.5)
            await shards.close()

    asyncio.run(run())


def test_a_bug_in_whoever_hears_of_a_result_comes_through(tmp_path: Path) -> None:
    def on_result(result: StepResult) -> None:
        raise AssertionError(f"step {result.id} again")

    async def run() -> None:
        async with connected(tmp_path, {}, {}) as (shards, _):
            stream = asyncio.create_task(shards.run(on_result))
            await asyncio.sleep(0)
            shards.send(plan(1))
            with pytest.raises(AssertionError, match="step 1 again"):
                await asyncio.wait_for(stream, 10)

    asyncio.run(run())


class WrongShard(Shard):
    """Answers step 2 as `answers` says, and steps that are among these not again."""

    def __init__(self, urls: list[str], *answers: pb.StepResponse) -> None:
        super().__init__(urls)
        self._answers = answers

    async def Tokens(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: Context
    ) -> AsyncIterator[pb.StepResponse]:
        async for step in request_iterator:
            if step.id == 2:
                for answer in self._answers:
                    yield answer
            elif step.id == 1 or all(step.id != answer.id for answer in self._answers):
                yield pb.StepResponse(id=step.id, token_ids=[7])
            if step.id == 3:  # not the end of a stream is what the router finds
                await asyncio.sleep(60)


SECOND = pb.StepResponse(id=2, token_ids=[7])


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([SECOND, SECOND], "shard 1 answered step 2, but the next one is step 3"),
        ([SECOND, pb.StepResponse(id=3)], "shard 1 sampled other tokens in step 3 than shard 0"),
        ([SECOND, pb.StepResponse(id=3, token_ids=[7]), SECOND], "shard 1 answered step 2, but no step is to be"),
        ([pb.StepResponse(id=1, token_ids=[7])], "shard 1 answered step 1, but the next one is step 2"),
        ([pb.StepResponse(id=2, token_ids=[8])], "shard 1 sampled other tokens in step 2 than shard 0"),
        ([pb.StepResponse(id=2, error="out of memory")], "shard 1 sampled other tokens in step 2 than shard 0"),
    ],
    ids=["twice", "too few tokens", "too late", "again", "another token", "an error of its own"],
)
def test_a_shard_that_answers_what_nobody_asked_or_disagrees_is_lost_and_named(
    tmp_path: Path, answers: list[pb.StepResponse], problem: str
) -> None:
    sockets = [tmp_path / f"shard-{rank}" for rank in range(2)]
    urls = [f"unix://{socket}" for socket in sockets]

    async def run() -> None:
        async with listening(sockets[0], WrongShard(urls, SECOND)), listening(sockets[1], WrongShard(urls, *answers)):
            shards = await GrpcShards.connect(str(sockets[0]), timeout=10)
            stream = asyncio.create_task(shards.run(lambda result: None))
            await asyncio.sleep(0)
            for number in (1, 2, 3):
                shards.send(plan(number))
            with pytest.raises(ShardsLost, match=problem):
                await asyncio.wait_for(stream, 10)
            await shards.close()

    asyncio.run(run())


def test_a_row_that_failed_on_the_first_shard_may_have_any_token_on_others() -> None:
    answers = StepAnswers(2)
    answers.ask(1)
    failed = [pb.RowError(index=1, message="no mask")]
    assert answers.problem(0, pb.StepResponse(id=1, token_ids=[5, 0], row_errors=failed)) is None
    assert answers.problem(1, pb.StepResponse(id=1, token_ids=[5, 9])) is None


def test_a_shard_that_falls_behind_is_named() -> None:
    answers = StepAnswers(2)
    for number in range(MAX_BEHIND + 1):
        answers.ask(number)
    problems = [answers.problem(0, pb.StepResponse(id=number)) for number in range(MAX_BEHIND + 1)]
    assert problems == [None] * MAX_BEHIND + [f"shard 1 has not answered {MAX_BEHIND} steps that shard 0 has"]


# ---- messages -------------------------------------------------------------------------------------------------------


def sent(folder: Path, step: StepPlan) -> pb.StepRequest:
    async def run() -> pb.StepRequest:
        async with connected(folder, {}) as (shards, told):
            await results_of(shards, told, [step])
            return told[0].steps[0]

    return asyncio.run(run())


def test_rows_and_new_blocks_run_in_parallel(tmp_path: Path) -> None:
    step = sent(tmp_path, plan(9, rows=[4, 0, 7], num_tokens=[1, 12, 1], new_blocks=[[], [8, 3], [5]]))
    assert (step.id, list(step.rows), list(step.num_tokens)) == (9, [4, 0, 7], [1, 12, 1])
    assert (list(step.num_new_blocks), list(step.new_blocks)) == ([0, 2, 1], [8, 3, 5])


def test_an_admission_says_everything_about_its_request(tmp_path: Path) -> None:
    parameters = sampling(
        do_sample=True, temperature=0.5, top_k=9, top_p=0.75, typical_p=0.25, min_p=0.125, repetition_penalty=1.5,
        frequency_penalty=0.5, presence_penalty=-0.5, watermark=True, seed=2**63, logit_bias={3: -2.5},
    )  # fmt: skip
    request = generation(77, [5, 6, 7], 10, parameters, top_n_tokens=2, prompt_logprobs=True)
    admission = Admission(3, request, [5, 6, 7], num_generated=0, num_cached=2, blocks=[11])
    (told,) = sent(tmp_path, plan(1, admitted=[admission])).admitted
    assert unpack_token_ids(told.input_ids).tolist() == [5, 6, 7]
    assert (told.row, told.request_id, told.num_cached, list(told.blocks)) == (3, 77, 2, [11])
    assert (told.top_n_tokens, told.prompt_logprobs) == (2, True)
    chosen = told.parameters
    assert (chosen.do_sample, chosen.temperature, chosen.top_k, chosen.top_p) == (True, 0.5, 9, 0.75)
    assert (chosen.typical_p, chosen.min_p, chosen.repetition_penalty) == (0.25, 0.125, 1.5)
    assert (chosen.frequency_penalty, chosen.presence_penalty) == (0.5, -0.5)
    assert (chosen.watermark, chosen.seed, dict(chosen.token_bias)) == (True, 2**63, {3: -2.5})


def test_prompt_logprobs_are_not_asked_for_a_second_time_after_preemption(tmp_path: Path) -> None:
    request = generation(77, [5, 6, 7], 10, prompt_logprobs=True)
    admission = Admission(3, request, [5, 6, 7, 8], num_generated=1, num_cached=0, blocks=[])
    (told,) = sent(tmp_path, plan(1, admitted=[admission])).admitted
    assert (told.num_generated, told.prompt_logprobs) == (1, False)


def test_questions_that_wait_when_the_shards_are_closed_are_answered(tmp_path: Path) -> None:
    """gRPC cancels the calls of a channel that is closed. Whoever waits for one is not cancelled: it would take the
    idle check of the health monitor, or the request that waits for its grammar, with it."""

    async def scenario() -> None:
        socket = tmp_path / "shard-0"
        async with listening(socket, SilentShard([f"unix://{socket}"])):
            shards = await GrpcShards.connect(str(socket), timeout=10)
            health = asyncio.create_task(shards.healthy(60))
            grammar = asyncio.create_task(shards.prepare(Grammar(GrammarKind.REGEX, "a+")))
            cancelled = asyncio.create_task(shards.prepare(Grammar(GrammarKind.REGEX, "b+")))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            await asyncio.wait([cancelled], timeout=10)
            await shards.close()
            await asyncio.wait([health, grammar], timeout=10)
            assert not health.cancelled() and not health.result()
            assert not grammar.cancelled() and isinstance(grammar.exception(), ShardsLost)
            assert cancelled.cancelled()

    asyncio.run(scenario())
