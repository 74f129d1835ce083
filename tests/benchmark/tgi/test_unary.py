"""The conversation of text-generation-benchmark with a shard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.shard import ShardFailed, running
from legato.benchmark.tgi.cli import FILLER, benchmark, text_prompts
from legato.benchmark.tgi.unary import BatchResult
from legato.common.errors import OptionError
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.shapes import write_shape
from tests.benchmark.fake_shard import BLOCK_SIZE, VOCAB, FakeService, listening


def measure(service: FakeService, options: BenchmarkOptions) -> list[BatchResult]:
    results: list[BatchResult] = []

    async def conversation() -> None:
        async with listening(service):
            await benchmark(options, running(service.path), max(options.batch_sizes), results)

    asyncio.run(conversation())
    return results


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(f"{tmp_path}/shard-0")


def test_a_run_is_a_prefill_and_a_decode_for_every_further_token(service: FakeService) -> None:
    measure(service, BenchmarkOptions(batch_size=(2,), decode_length=3, runs=1, warmups=0))
    assert service.calls == ["Warmup", "Prefill", "Decode", "Decode", "ClearCache"]


def test_every_run_is_measured_and_no_warm_up_is(service: FakeService) -> None:
    (result,) = measure(service, BenchmarkOptions(batch_size=(2,), decode_length=4, runs=3, warmups=2))
    assert service.calls.count("Prefill") == 5
    assert len(result.prefills) == 3
    assert [len(steps) for steps in result.decodes] == [3, 3, 3]


def test_batches_have_the_sizes_that_were_asked_for(service: FakeService) -> None:
    results = measure(service, BenchmarkOptions(batch_size=(1, 3), runs=1, warmups=0))
    assert [result.batch_size for result in results] == [1, 3]
    assert [len(request.batch.requests) for request in service.of("Prefill")] == [1, 3]


def test_prompts_are_ids_of_the_exact_length_and_go_on_to_the_last_token(service: FakeService) -> None:
    measure(service, BenchmarkOptions(batch_size=(3,), sequence_length=17, decode_length=5, runs=1, warmups=0))
    requests = service.of("Prefill")[0].batch.requests
    assert [len(request.input_ids) for request in requests] == [17] * 3
    assert max(max(request.input_ids) for request in requests) < VOCAB
    assert len({tuple(request.input_ids) for request in requests}) == 3
    assert [request.id for request in requests] == [0, 1, 2]
    stopping = requests[0].stopping_parameters
    assert stopping.ignore_eos_token and stopping.max_new_tokens == 5


def test_absent_sampling_options_are_neutral(service: FakeService) -> None:
    measure(service, BenchmarkOptions(batch_size=(1,), runs=1, warmups=0))
    chosen = service.of("Prefill")[0].batch.requests[0].parameters
    assert (chosen.temperature, chosen.top_p, chosen.typical_p, chosen.repetition_penalty) == (1, 1, 1, 1)
    assert (chosen.top_k, chosen.frequency_penalty, chosen.do_sample) == (0, 0, False)


def test_sampling_options_reach_the_shard(service: FakeService) -> None:
    asked = BenchmarkOptions(batch_size=(1,), runs=1, temperature=0.5, top_k=7, do_sample=True, top_n_tokens=2)
    measure(service, asked)
    request = service.of("Prefill")[0].batch.requests[0]
    assert (request.parameters.temperature, request.parameters.top_k, request.parameters.do_sample) == (0.5, 7, True)
    assert request.top_n_tokens == 2


def test_the_shard_is_warmed_up_for_the_largest_batch(service: FakeService) -> None:
    measure(service, BenchmarkOptions(batch_size=(1, 5), sequence_length=10, decode_length=3, runs=1))
    (warmup,) = service.of("Warmup")
    assert warmup.max_rows == 5
    # 13 tokens take four blocks each
    assert warmup.max_batch_total_tokens == 5 * 4 * BLOCK_SIZE


def test_a_shard_that_a_router_drives_says_how_to_free_it(tmp_path: Path) -> None:
    service = FakeService(f"{tmp_path}/shard-0", driven_by_router=True)
    with pytest.raises(ShardFailed, match=r"refused Warmup.*while a router is connected.*stop it.*--spawn"):
        measure(service, BenchmarkOptions())


def test_sequences_that_the_model_cannot_take_are_refused_by_name(service: FakeService) -> None:
    with pytest.raises(OptionError, match=r"--sequence-length and --decode-length.* 308 .* 256"):
        measure(service, BenchmarkOptions(sequence_length=300))
    assert service.calls == []


def test_a_socket_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionError, match="no shard listens on /nowhere/shard-0"):
        running("/nowhere/shard-0")


def test_a_batch_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="--batch-size 0"):
        _ = BenchmarkOptions(batch_size=(4, 0)).batch_sizes


@pytest.mark.parametrize("length", [1, 100, len(FILLER) * 2 + 1])
def test_a_text_has_as_many_tokens_as_the_shard_is_told_to_keep(tmp_path: Path, length: int) -> None:
    tokenizer = ModelFiles.open(write_shape("tiny", tmp_path)).tokenizer()
    first, second = text_prompts(2, length, tokenizer)
    assert first == second
    assert len(tokenizer.encode(first.inputs).ids) == length == first.truncate


def test_with_a_tokenizer_prompts_are_text(service: FakeService, tmp_path: Path) -> None:
    write_shape("tiny", tmp_path / "model")
    measure(service, BenchmarkOptions(batch_size=(1,), runs=1, tokenizer_name=str(tmp_path / "model")))
    (request,) = service.of("Prefill")[0].batch.requests
    assert request.inputs.startswith("Lorem") and not request.input_ids
    assert request.truncate == 10
