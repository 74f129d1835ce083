"""TGI's unary calls: batches that begin, join, shrink, end and are cleared, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.server.loading import LoadedModel
from legato.server.model import Model
from tests.server.shard import OPTIONS, Log, decode, finish, load_model, prefill, refusal, request, serving, warmup
from tests.tiny_models import greedy_oracle, tiny_llama

T = TypeVar("T")
Conversation = Callable[[rpc.TextGenerationServiceStub], Coroutine[None, None, T]]

# What `warmup` leaves to the callers: rows, and blocks of 4 tokens.
NUM_ROWS, NUM_BLOCKS = 8, 128
PROMPT = [100, 7, 256, 33, 90, 12, 201, 5, 77]
EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture
def talk(loaded: LoadedModel, tmp_path: Path) -> Callable[[Conversation[T]], T]:
    """Hold a conversation with a warm shard. At its end every row and block must be free again."""

    def hold(conversation: Conversation[T]) -> T:
        async def run() -> T:
            async with serving(loaded, tmp_path / "shard-0") as shard:
                await shard.Warmup(warmup())
                result = await conversation(shard)
                await check_all_free(shard)
                return result

        return asyncio.run(run())

    return hold


async def check_all_free(shard: rpc.TextGenerationServiceStub) -> None:
    """As many requests as there are rows, with all blocks between them, fit in."""
    tokens = NUM_BLOCKS * 4 // NUM_ROWS
    requests = [request(900 + row, PROMPT, tokens - len(PROMPT) + 1) for row in range(NUM_ROWS)]
    answer = await shard.Prefill(pb.PrefillRequest(batch=pb.Batch(id=900, requests=requests)))
    assert answer.batch.size == NUM_ROWS
    with pytest.raises(grpc.aio.AioRpcError, match="no row is free"):
        await shard.Prefill(prefill(999, request(999, PROMPT, 1)))
    await shard.ClearCache(pb.ClearCacheRequest(id=900))


# ---- tokens, texts and ends -----------------------------------------------------------------------------------------


def generate(talk: Callable[[Conversation[Log]], Log], *requests: pb.Request) -> Log:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        await finish(shard, log, log.add(await shard.Prefill(prefill(1, *requests))))
        return log

    return talk(conversation)


def test_a_batch_has_the_tokens_of_transformers_and_ends_by_length(talk: Any, folder: Path) -> None:
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:], PROMPT * 5]
    log = generate(talk, *(request(i, prompt, 6 + i) for i, prompt in enumerate(prompts)))
    expected = greedy_oracle(folder, prompts, 9)
    assert log.tokens == {i: expected[i][: 6 + i] for i in range(4)}
    for i, text in log.texts.items():
        assert (text.finish_reason, text.generated_tokens) == (pb.FINISH_REASON_LENGTH, 6 + i)
        assert text.text == log.pieces[i]
        assert not text.HasField("seed")


def test_an_end_token_ends_it_unless_it_is_to_be_ignored(talk: Any) -> None:
    """A bias makes the end token the likeliest from the start."""
    parameters = pb.NextTokenChooserParameters(token_bias={EOS: 1000.0})
    log = generate(
        talk,
        request(1, PROMPT, 5, ignore_eos=False, parameters=parameters),
        request(2, PROMPT, 5, ignore_eos=True, parameters=parameters),
    )
    assert log.tokens == {1: [EOS], 2: [EOS] * 5}
    assert log.texts[1].finish_reason == pb.FINISH_REASON_EOS_TOKEN
    assert log.texts[1].text == ""
    assert log.texts[2].finish_reason == pb.FINISH_REASON_LENGTH


def test_a_stop_string_ends_it_and_is_the_last_of_its_text(talk: Any) -> None:
    whole = generate(talk, request(1, PROMPT, 30)).texts[1].text
    stop = whole[10:12]
    log = generate(talk, request(1, PROMPT, 30, stop=[stop]))
    assert log.texts[1].finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert log.texts[1].text == log.pieces[1] == whole[: whole.index(stop) + len(stop)]


def test_half_a_stop_string_at_the_end_is_text(talk: Any) -> None:
    whole = generate(talk, request(1, PROMPT, 8)).texts[1].text
    log = generate(talk, request(1, PROMPT, 8, stop=[whole[-2:] + "?"]))
    assert log.texts[1].text == whole


def test_a_seed_gives_the_same_tokens_again_and_is_reported(talk: Any) -> None:
    parameters = pb.NextTokenChooserParameters(do_sample=True, seed=42, temperature=1.5)
    first = generate(talk, request(1, PROMPT, 10, parameters=parameters))
    second = generate(talk, request(5, PROMPT[2:], 4), request(1, PROMPT, 10, parameters=parameters))
    assert first.tokens[1] == second.tokens[1]
    assert first.texts[1].seed == 42


def test_text_is_tokenized_and_truncated_from_the_left(talk: Any, loaded: LoadedModel) -> None:
    ids = loaded.files.tokenizer().encode("truncated", add_special_tokens=False).ids
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=4, ignore_eos_token=True)
    chunks = pb.Input(chunks=[pb.InputChunk(text="trun"), pb.InputChunk(text="cated")])
    log = generate(
        talk,
        request(1, ids[-5:], 4),
        pb.Request(id=2, inputs="truncated", truncate=5, stopping_parameters=stopping),
        pb.Request(id=3, input_chunks=chunks, truncate=5, stopping_parameters=stopping),
    )
    assert log.tokens[1] == log.tokens[2] == log.tokens[3]


def test_prompt_logprobs_and_top_tokens_come_on_request(talk: Any, loaded: LoadedModel) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> list[pb.Generation]:
        answer = await shard.Prefill(
            prefill(1, request(1, PROMPT, 2, prefill_logprobs=True, top_n_tokens=3), request(2, PROMPT, 2))
        )
        after = await shard.Decode(decode(answer.batch))
        return [*answer.generations, *after.generations]

    asked, not_asked, later, _ = talk(conversation)
    assert list(asked.prefill_tokens.ids) == PROMPT
    assert math.isnan(asked.prefill_tokens.logprobs[0])
    assert all(logprob < 0 for logprob in asked.prefill_tokens.logprobs[1:])
    assert not not_asked.prefill_tokens.ids
    assert not later.prefill_tokens.ids
    for generation in (asked, later):
        (top,) = generation.top_tokens
        assert top.ids[0] == generation.tokens.ids[0]
        assert top.logprobs[0] == pytest.approx(generation.tokens.logprobs[0], abs=1e-5)
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        assert len(top.texts) == len(top.is_special) == 3
    assert not not_asked.top_tokens


# ---- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_joins_another_at_prefill(talk: Any, folder: Path) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        first = log.add(await shard.Prefill(prefill(1, request(1, PROMPT, 8))))
        joined = log.add(await shard.Prefill(prefill(2, request(2, PROMPT[4:], 8), join=first)))
        assert joined is not None
        assert sorted(joined.request_ids) == [1, 2]
        await finish(shard, log, joined)
        return log

    log = talk(conversation)
    expected = greedy_oracle(folder, [PROMPT, PROMPT[4:]], 8)
    assert log.tokens == {1: expected[0], 2: expected[1]}


def test_batches_join_at_decode(talk: Any, folder: Path) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        batches = [log.add(await shard.Prefill(prefill(i, request(i, PROMPT[i:], 8)))) for i in range(4)]
        joined = log.add(await shard.Decode(decode(*batches)))
        assert joined is not None
        assert (joined.id, joined.size) == (0, 4)
        await finish(shard, log, joined)
        return log

    expected = greedy_oracle(folder, [PROMPT[i:] for i in range(4)], 8)
    assert talk(conversation).tokens == dict(enumerate(expected))


def test_filtering_keeps_some_and_the_others_are_forgotten(talk: Any, folder: Path) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        log.add(await shard.Prefill(prefill(3, *(request(i, PROMPT[i:], 8) for i in range(4)))))
        kept = (await shard.FilterBatch(pb.FilterBatchRequest(batch_id=3, request_ids=[1, 3]))).batch
        assert (kept.id, list(kept.request_ids), kept.size) == (3, [1, 3], 2)
        await finish(shard, log, kept)
        return log

    log = talk(conversation)
    expected = greedy_oracle(folder, [PROMPT[i:] for i in range(4)], 8)
    assert {i: log.tokens[i] for i in (1, 3)} == {i: expected[i] for i in (1, 3)}
    assert [len(log.tokens[i]) for i in (0, 2)] == [1, 1]


def test_a_batch_that_nothing_is_kept_of_is_gone(talk: Any) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        await shard.Prefill(prefill(3, request(1, PROMPT, 8)))
        kept = (await shard.FilterBatch(pb.FilterBatchRequest(batch_id=3))).batch
        assert kept.size == 0
        code, _ = await refusal(shard.Decode(decode(kept)))
        assert code is grpc.StatusCode.NOT_FOUND

    talk(conversation)


def test_clearing_forgets_one_batch_or_all(talk: Any) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        batches = [(await shard.Prefill(prefill(i, request(i, PROMPT, 8)))).batch for i in range(4)]
        await shard.ClearCache(pb.ClearCacheRequest(id=1))
        await shard.ClearCache(pb.ClearCacheRequest(id=1))
        assert (await shard.Decode(pb.DecodeRequest(batches=[batches[0]]))).batch.size == 1
        await shard.ClearCache(pb.ClearCacheRequest())
        for batch in batches:
            code, _ = await refusal(shard.Decode(decode(batch)))
            assert code is grpc.StatusCode.NOT_FOUND

    talk(conversation)


# ---- blocks and chunks that the caller chooses ----------------------------------------------------------------------


def test_a_prompt_may_come_in_chunks(talk: Any, folder: Path) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        decoding = log.add(await shard.Prefill(prefill(1, request(1, PROMPT, 8))))
        chunked = request(2, PROMPT * 3, 8, chunk_len=10, prefill_logprobs=True)
        answer = await shard.Prefill(prefill(2, chunked, join=decoding))
        assert [generation.request_id for generation in answer.generations] == [1]
        rest = await shard.Decode(decode(log.add(answer)))
        (prompt,) = [generation.prefill_tokens for generation in rest.generations if generation.request_id == 2]
        assert len(prompt.ids) == len(prompt.logprobs) == 3 * len(PROMPT)
        await finish(shard, log, log.add(rest))
        return log

    expected = greedy_oracle(folder, [PROMPT, PROMPT * 3], 8)
    assert talk(conversation).tokens == {1: expected[0], 2: expected[1]}


def test_a_caller_may_choose_blocks_and_share_what_is_in_them(talk: Any, folder: Path) -> None:
    """Blocks 5 and 9 hold the first 8 tokens after the first request; the second one begins with them."""

    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        first = log.add(await shard.Prefill(prefill(1, request(1, PROMPT, 7, blocks=[5, 9, 2, 70]))))
        sharing = request(2, [*PROMPT[:8], 55, 66], 7, blocks=[5, 9, 30, 31], cache_len=8, prefill_logprobs=True)
        answer = await shard.Prefill(prefill(2, sharing))
        logprobs = answer.generations[0].prefill_tokens.logprobs
        assert [math.isnan(logprob) for logprob in logprobs] == [True] * 9 + [False]
        await finish(shard, log, first)
        await finish(shard, log, log.add(answer))
        return log

    expected = greedy_oracle(folder, [PROMPT, [*PROMPT[:8], 55, 66]], 7)
    assert talk(conversation).tokens == {1: expected[0], 2: expected[1]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": [1, 2]}, "3 KV blocks needed, 2 given"),
        ({"blocks": [1, 2, 2]}, "named twice"),
        ({"blocks": [0, 1, 2]}, "block 0 is not free"),
        ({"blocks": [1, 2, NUM_BLOCKS + 1]}, f"block {NUM_BLOCKS + 1} is not free"),
        ({"blocks": [1, 2, 3], "cache_len": len(PROMPT)}, "at least one must be computed"),
    ],
)
def test_blocks_that_cannot_be_are_refused(talk: Any, changes: dict[str, Any], words: str) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        code, details = await refusal(shard.Prefill(prefill(1, request(1, PROMPT, 4, **changes))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details

    talk(conversation)


def test_a_caller_cannot_choose_a_block_that_the_shard_gave_to_another(talk: Any) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        everything = [request(row, PROMPT, 56) for row in range(NUM_ROWS - 1)]
        await shard.Prefill(prefill(1, *everything))
        taken = list(range(1, 120))
        _, details = await refusal(shard.Prefill(prefill(2, request(50, PROMPT, 90, blocks=taken))))
        assert "is not free" in details
        await shard.ClearCache(pb.ClearCacheRequest())

    talk(conversation)


def test_block_0_is_for_the_health_call_of_tgis_router(talk: Any) -> None:
    """Which it makes after a failed generation, again and again, until it is answered."""

    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        for _ in range(3):
            answer = await shard.Prefill(prefill(2**64 - 1, request(2**64 - 1, PROMPT[:1], 1, blocks=[0], slots=[0])))
            assert answer.generations[0].generated_text.generated_tokens == 1

    talk(conversation)


def test_a_router_that_names_no_rows_may_run_more_than_128_requests(loaded: LoadedModel, tmp_path: Path) -> None:
    """TGI's router does not know of `max_rows`, and runs as many requests as --max-concurrent-requests allows."""

    async def run() -> int:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            await shard.Warmup(pb.WarmupRequest(max_input_tokens=8, max_prefill_tokens=512, max_total_tokens=16))
            requests = [request(number, PROMPT[:2], 2) for number in range(200)]
            return int((await shard.Prefill(prefill(1, *requests))).batch.size)

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize(
    ("named", "expected"), [({}, (32, 5)), ({"max_input_tokens": 16, "max_rows": 3}, (16, 3))], ids=["none", "both"]
)
def test_options_are_for_callers_that_name_no_limits(
    loaded: LoadedModel, named: dict[str, int], expected: tuple[int, int]
) -> None:
    model = Model(loaded, replace(OPTIONS, max_input_tokens=32, max_batch_size=5))
    capacity = model.warmup(pb.WarmupRequest(max_total_tokens=64, **named))
    assert (capacity.max_input_tokens, capacity.max_rows) == expected


def test_joined_batches_tell_how_long_that_took(talk: Any) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        first = await shard.Prefill(prefill(1, request(1, PROMPT, 9)))
        second = await shard.Prefill(prefill(2, request(2, PROMPT, 9)))
        assert not first.HasField("concat_ns")
        both = await shard.Decode(decode(first.batch, second.batch))
        assert 0 < both.concat_ns < both.total_ns
        assert not (await shard.Decode(decode(both.batch))).HasField("concat_ns")
        third = await shard.Prefill(prefill(3, request(3, PROMPT, 9), join=both.batch))
        assert 0 < third.concat_ns < third.total_ns
        await shard.ClearCache(pb.ClearCacheRequest())

    talk(conversation)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (request(1, [], 4), "0 prompt tokens"),
        (request(1, PROMPT, 200), "are not within 1 to 128"),
        (request(1, [*PROMPT, 320], 4), "token 320 is not in the vocabulary of 320"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_whole_batch(talk: Any, refused: pb.Request, words: str) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        code, details = await refusal(shard.Prefill(prefill(1, request(7, PROMPT, 4), refused)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details

    talk(conversation)


def test_more_requests_than_rows_or_tokens_than_blocks_are_refused(talk: Any) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> None:
        for crowd in ([request(i, PROMPT, 2) for i in range(9)], [request(i, PROMPT, 119) for i in range(5)]):
            code, _ = await refusal(shard.Prefill(prefill(1, *crowd)))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

    talk(conversation)


def test_an_error_in_a_call_leaves_every_batch_as_it_was(talk: Any, folder: Path) -> None:
    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log, stranger = Log(), pb.CachedBatch(id=99)
        batch = log.add(await shard.Prefill(prefill(1, request(1, PROMPT, 8))))
        calls = {
            shard.Decode(pb.DecodeRequest()): grpc.StatusCode.INVALID_ARGUMENT,
            shard.Decode(decode(batch, stranger)): grpc.StatusCode.NOT_FOUND,
            shard.Prefill(prefill(2)): grpc.StatusCode.INVALID_ARGUMENT,
            shard.Prefill(prefill(1, request(2, PROMPT, 8))): grpc.StatusCode.ALREADY_EXISTS,
            shard.Prefill(prefill(2, request(2, PROMPT, 8), join=stranger)): grpc.StatusCode.NOT_FOUND,
            shard.Prefill(prefill(2, request(2, PROMPT, 900), join=batch)): grpc.StatusCode.INVALID_ARGUMENT,
            shard.FilterBatch(pb.FilterBatchRequest(batch_id=99)): grpc.StatusCode.NOT_FOUND,
            shard.FilterBatch(pb.FilterBatchRequest(batch_id=1, request_ids=[1, 2])): grpc.StatusCode.INVALID_ARGUMENT,
        }
        for call, expected in calls.items():
            code, _ = await refusal(call)
            assert code is expected
        await finish(shard, log, batch)
        return log

    assert talk(conversation).tokens == {1: greedy_oracle(folder, [PROMPT], 8)[0]}


def test_a_forward_that_fails_ends_its_batch_and_no_other(
    talk: Any, folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of steam")

    async def conversation(shard: rpc.TextGenerationServiceStub) -> Log:
        log = Log()
        first = log.add(await shard.Prefill(prefill(1, request(1, PROMPT, 8))))
        second = log.add(await shard.Prefill(prefill(2, request(2, PROMPT, 8))))
        with monkeypatch.context() as broken:
            broken.setattr(loaded.model, "forward", fail)
            code, details = await refusal(shard.Decode(decode(first)))
        assert (code, details) == (grpc.StatusCode.INTERNAL, "RuntimeError: out of steam")
        code, _ = await refusal(shard.Decode(decode(first)))
        assert code is grpc.StatusCode.NOT_FOUND
        await finish(shard, log, second)
        return log

    assert talk(conversation).tokens[2] == greedy_oracle(folder, [PROMPT], 8)[0]


def test_a_missing_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    """Only these calls need one, so only they complain."""
    bare = tmp_path / "model"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()

    async def run() -> None:
        async with serving(load_model(bare), tmp_path / "shard-0") as shard:
            await shard.Warmup(warmup())
            code, details = await refusal(shard.Prefill(prefill(1, request(1, PROMPT, 1))))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "tokenizer.json is missing" in details

    asyncio.run(run())
