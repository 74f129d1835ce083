"""Shards of one model: what fails on one of them alone must not leave the others waiting in a collective."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import CausalModel, get_model
from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.server.graphs.steps import StepGraphs
from legato.server.loading import LoadedModel
from legato.server.model import Model
from legato.server.service import TextGenerationService
from tests.server.faults import Faults, FaultyModel, record
from tests.server.local import LocalServer, load
from tests.server.shard import OPTIONS, warmup
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def serve_one_step(folder: Path, meeting: str, rank: int, errors: Path) -> None:
    """One of two shards. The second runs out of memory in the middle of its first forward after warm-up."""
    with errors.open("ab") as file:  # the stderr of a fork server is that of the test which needed one first
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    shard, files = Shard(rank, 2), ModelFiles.open(folder)
    model = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, CPU, shard=shard)
    service = TextGenerationService(Model(LoadedModel(model, files, CPU, torch.float32, shard), OPTIONS), [])
    service._model.warmup(warmup())
    if rank == 1:
        faults = Faults()
        faults.arm("forward", 1, times=100)
        model.forward = faults.before("forward", model.forward)  # type: ignore[method-assign]
    admission = pb.Admission(row=1, request_id=1, input_ids=pack_token_ids([5, 6, 7]))
    service._launch(
        pb.StepRequest(id=7, admitted=[admission], rows=[1], num_tokens=[3], num_new_blocks=[1], new_blocks=[1])
    )


def test_a_shard_without_memory_ends_and_with_it_its_peers(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    arguments = [(folder, f"file://{tmp_path}/meeting", rank, tmp_path / "errors") for rank in (0, 1)]
    shards = [context.Process(target=serve_one_step, args=each, daemon=True) for each in arguments]
    for shard in shards:
        shard.start()
    deadline = time.monotonic() + 60
    for shard in shards:
        shard.join(max(0.0, deadline - time.monotonic()))
    codes = [shard.exitcode for shard in shards]
    for shard in shards:
        shard.kill()
    assert codes == [1, 1]
    assert "error: shard 1 failed in step 7: Out of memory" in (tmp_path / "errors").read_text()


class Peers(Shard):
    """One of two shards, without the other, which could or could not capture what this one captures."""

    can_capture = True

    def least(self, value: int, device: torch.device) -> int:
        return min(value, int(self.can_capture))


class PeersWithoutGraphs(Peers):
    can_capture = False


def graphs_of(model: CausalModel, shard: Shard, faults: Faults) -> StepGraphs:
    server = LocalServer(FaultyModel(model, faults), max_rows=4)
    server.engine.shard = shard
    server.engine.use_graphs((), record(faults), mixed=[])
    assert server.engine.graphs is not None
    return server.engine.graphs


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def test_a_size_that_all_shards_captured_is_used(model: CausalModel) -> None:
    graphs = graphs_of(model, Peers(0, 2), Faults())
    graphs.capture_first()
    assert graphs.kinds[0].policy.captured == {1, 2, 4}


def test_a_size_that_another_shard_cannot_capture_is_dropped(
    model: CausalModel, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = graphs_of(model, PeersWithoutGraphs(0, 2), Faults())
    graphs.capture_first()
    (decodes,) = graphs.kinds
    assert not decodes.policy.captured and not graphs.num_pending and decodes.run([0]) is None  # type: ignore[attr-defined]
    assert "CUDA graph capture failed for 4 rows (on another shard); this size runs eagerly." in caplog.text


def test_a_size_that_this_shard_cannot_capture_is_dropped_after_the_others_know(model: CausalModel) -> None:
    faults = Faults()
    graphs = graphs_of(model, Peers(0, 2), faults)
    faults.arm("capture", 1)
    graphs.capture_first()
    assert not graphs.kinds[0].policy.captured and not graphs.num_pending


def test_a_failure_before_the_capture_is_not_hidden_from_the_group(model: CausalModel) -> None:
    """The others are in a collective of the same step: only the end of this shard can tell them."""
    faults = Faults()
    graphs = graphs_of(model, Peers(0, 2), faults)
    faults.arm("forward", 1)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture_first()


def test_a_failure_before_the_capture_costs_a_shard_that_is_alone_its_graphs(model: CausalModel) -> None:
    faults = Faults()
    graphs = graphs_of(model, Shard(), faults)
    faults.arm("forward", 1)
    graphs.capture_first()
    assert not graphs.kinds[0].policy.captured and not graphs.num_pending
