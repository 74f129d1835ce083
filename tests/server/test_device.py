"""A device that fails: the shard ends, because only a new process can use it again. A busy one does not."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from pathlib import Path

import grpc
import pytest
import torch

from legato.common.restarts import EXIT_DEVICE_FAILED
from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.server import service as service_module
from legato.server.device import is_device_failure
from legato.server.loading import LoadedModel
from legato.server.model import Model
from legato.server.service import TextGenerationService
from tests.server.shard import OPTIONS, load_model, refusal, serving, warmup
from tests.tiny_models import tiny_llama

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError(ILLEGAL), True),
        (RuntimeError(ILLEGAL), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (RuntimeError("a stray cosmic ray"), False),
        (ValueError(ILLEGAL), False),
    ],
)
def test_which_errors_are_the_devices(error: Exception, expected: bool) -> None:
    assert is_device_failure(error) is expected


def step() -> pb.StepRequest:
    admission = pb.Admission(row=0, request_id=1, input_ids=pack_token_ids([5, 6, 7]))
    return pb.StepRequest(id=7, admitted=[admission], rows=[0], num_tokens=[3], num_new_blocks=[1], new_blocks=[1])


def fail_in_a_step(folder: Path) -> None:
    model = Model(load_model(folder), OPTIONS)
    model.warmup(warmup())

    def forward(*args: object) -> torch.Tensor:
        raise torch.AcceleratorError(ILLEGAL)

    model.loaded.model.forward = forward  # type: ignore[method-assign, assignment]
    TextGenerationService(model, [])._launch(step())


def test_a_shard_whose_device_fails_ends_with_a_code_and_a_line_of_its_own(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    shard = context.Process(target=fail_in_a_step, args=(folder,), daemon=True)
    shard.start()
    shard.join(60)
    assert shard.exitcode == EXIT_DEVICE_FAILED
    line = "error: the device failed in step 7: CUDA error: an illegal memory access was encountered\n"
    assert line in capfd.readouterr().err


def test_health_uses_the_device(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []

    async def run() -> None:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            monkeypatch.setattr(Model, "touch", lambda self: touched.append(threading.current_thread().name))
            await shard.Health(pb.HealthRequest())

    asyncio.run(run())
    assert touched == ["engine_0"]


def test_a_device_that_does_not_answer_is_not_healthy_and_a_busy_one_is(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "DEVICE_SECONDS", 0.05)
    released = threading.Event()

    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            with monkeypatch.context() as patched:
                patched.setattr(Model, "warmup", lambda self, request: released.wait(30))
                warming = asyncio.ensure_future(shard.Warmup(warmup()))
                await asyncio.sleep(0.1)
                await shard.Health(pb.HealthRequest())  # busy is not dead
                released.set()
                await refusal(warming)
            hung = threading.Event()
            monkeypatch.setattr(Model, "touch", lambda self: hung.wait(30))
            answer = await refusal(shard.Health(pb.HealthRequest()))
            hung.set()
            return answer

    code, message = asyncio.run(run())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert message == "the device has not finished an addition within 0.05 s"


def test_a_second_warm_up_with_the_same_limits_changes_nothing(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new router finds the cache and the graphs of the last."""
    warmups: list[pb.WarmupRequest] = []
    original = Model.warmup
    monkeypatch.setattr(Model, "warmup", lambda self, request: (warmups.append(request), original(self, request))[1])

    async def run() -> None:
        async with serving(loaded, tmp_path / "shard-0") as shard:
            first = await shard.Warmup(warmup())
            assert await shard.Warmup(warmup()) == first
            assert len(warmups) == 1
            await shard.Warmup(warmup(max_rows=3))
            assert len(warmups) == 2
            code, _ = await refusal(shard.Warmup(warmup(max_total_tokens=100_000, max_batch_total_tokens=16)))
            assert code is not grpc.StatusCode.OK
            await shard.Warmup(warmup(max_rows=3))
            assert len(warmups) == 4, "after a failure everything is new"

    asyncio.run(run())
