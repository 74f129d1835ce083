"""Four processes that are the shards of one model after another, over gloo.

They are started once for all tests: a group of the first two of them is a model of two shards. After a call in which
one of them was silent others take their place: it may still answer, or wait for a sum that another shard gave up, and
then every model behind it would get the answer of the one before, or none.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from legato.layers.shard import Shard, gather_into
from tests.models.answers import Answers, answer

MOST_SHARDS = 4
SECONDS = 60
# For all of them to import torch and to meet, on a machine with other work.
START_SECONDS = 300
READY = "ready"
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    text: str


class ShardProcesses:
    """A context: the processes live inside it. They start with the first model."""

    def __init__(self) -> None:
        self._started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._num_starts = 0

    def __enter__(self) -> ShardProcesses:
        self._folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(patience=10)
        self._folder.cleanup()

    def _stop(self, patience: float) -> None:
        started, self._started = self._started, []
        if patience:
            for _, pipe in started:
                pipe.send(None)
        for process, pipe in started:
            process.join(patience)
            process.kill()
            pipe.close()

    def answer(self, folder: Path, requests: list[list[int]], world_size: int) -> list[Answers]:
        """What each of `world_size` shards answers."""
        return self.call(answer, folder, requests, world_size=world_size)

    def call(self, function: Callable[..., T], *arguments: Any, world_size: int) -> list[T]:
        """What a function of this package returns in each of `world_size` shards, which it gets as `shard`."""
        if not self._started:
            self._start()
        pipes = [pipe for _, pipe in self._started[:world_size]]
        for pipe in pipes:
            pipe.send((function, arguments, world_size))
        # All are heard before any is judged: a reply that stays in its pipe would pass for that to the next model.
        replies = [pipe.recv() if pipe.poll(SECONDS) else Failure("silent") for pipe in pipes]
        failures = [f"shard {rank}: {said.text}" for rank, said in enumerate(replies) if isinstance(said, Failure)]
        if any(isinstance(said, Failure) for said in replies):
            self._stop(patience=0)
        assert not failures, f"of {world_size} shards failed:\n" + "\n".join(failures)
        return replies

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once, not four times
        self._num_starts += 1
        meeting = f"file://{self._folder.name}/meeting-{self._num_starts}"
        for rank in range(MOST_SHARDS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, meeting, theirs), daemon=True)
            process.start()
            self._started.append((process, ours))
        for _, pipe in self._started:  # so that a model's time is its own
            assert pipe.poll(START_SECONDS) and pipe.recv() == READY, "a shard did not start"


class GroupCollectives:
    """Of some of the processes, where a server's shards are all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((dist.get_world_size(self._group) * x.shape[0], x.shape[1]), dtype=x.dtype)
        gather_into(parts, x.contiguous(), group=self._group)
        return parts

    def least(self, value: int) -> int:
        agreed = torch.tensor(value)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._group)
        return int(agreed.item())


def _serve(rank: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=MOST_SHARDS)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, MOST_SHARDS + 1)}
    pipe.send(READY)
    while (job := pipe.recv()) is not None:
        function, arguments, world_size = job
        try:
            pipe.send(function(*arguments, shard=Shard(rank, world_size, GroupCollectives(groups[world_size]))))
        except Exception:
            pipe.send(Failure(traceback.format_exc()))
    dist.destroy_process_group()
