"""A local server whose stages fail on command, and that goes on as a shard does: a failed step is an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from legato.layers.kv_cache import KVCache
from legato.layers.step import Step
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.router.shards import _from_pb, _to_pb
from legato.server.graphs.decode import Decoded, Replay
from legato.server.pending import PendingStep
from legato.server.service import _failed
from tests.server.local import LocalServer

STAGES = ("forward", "logits", "sampler", "sampled", "configure", "blocks", "replay", "capture", "read")


class Faults:
    """`arm` lets the n-th call of a stage from now on fail, and as many after it as `times` says."""

    def __init__(self) -> None:
        self._stage = ""
        self._from = self._to = self._calls = 0
        self._error: type[Exception] = torch.OutOfMemoryError
        self.hits = 0

    def arm(self, stage: str, nth: int, error: type[Exception] = torch.OutOfMemoryError, times: int = 1) -> None:
        self._stage, self._from, self._to, self._error = stage, nth, nth + times, error
        self._calls = self.hits = 0

    def pass_or_fail(self, stage: str) -> None:
        if stage != self._stage:
            return
        self._calls += 1
        if self._from <= self._calls < self._to:
            self.hits += 1
            raise self._error(f"injected: {stage}")

    def before(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            self.pass_or_fail(stage)
            return call(*arguments, **named)

        return guarded

    def after(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            self.pass_or_fail(stage)
            return result

        return guarded


class FaultyModel:
    def __init__(self, model: CausalModel, faults: Faults) -> None:
        self.config, self.kv_shape = model.config, model.kv_shape
        self._model, self._faults = model, faults

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor:
        hidden = self._model.forward(step, cache)
        self._faults.pass_or_fail("forward")  # with its keys and values written: the worst time
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._faults.pass_or_fail("logits")
        return self._model.logits(hidden)


def record(faults: Faults) -> Callable[[Callable[[], Decoded]], tuple[Replay, Decoded]]:
    """Graphs without CUDA: a replay computes the step again. Its results are new tensors, because here nobody copies
    those of the step before to the host while they are still there."""

    def run(decode: Callable[[], Decoded]) -> tuple[Replay, Decoded]:
        faults.pass_or_fail("capture")
        static = decode()

        def replay() -> None:
            faults.pass_or_fail("replay")
            fresh = decode()
            for name in ("logits", "token_ids", "logprobs"):
                object.__setattr__(static, name, getattr(fresh, name))

        return replay, static

    return run


class FaultyServer(LocalServer):
    def __init__(self, model: CausalModel, *, graphs: bool = False, mixed: bool = False, **settings: Any) -> None:
        self.faults = Faults()
        super().__init__(FaultyModel(model, self.faults), **settings)
        self.errors: dict[int, str] = {}
        engine, faults = self.engine, self.faults
        engine.sampler.sample = faults.after("sampled", faults.before("sampler", engine.sampler.sample))  # type: ignore[method-assign]
        engine.sampler.set_row = faults.before("configure", engine.sampler.set_row)  # type: ignore[method-assign]
        engine.rows.write_blocks = faults.before("blocks", engine.rows.write_blocks)  # type: ignore[method-assign]
        if graphs:
            # Where nothing is captured, graphs of prompts take time instead of saving it.
            engine.use_graphs((), record(faults), mixed=[settings.get("step_tokens", 512)] if mixed else [])
            assert engine.graphs is not None
            engine.graphs.capture_first()

    def step(self) -> bool:
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.plan()) is not None:
            self._waiting.append(self._launch(_to_pb(plan)))
            if self.engine.graphs is not None and (capture := self.engine.graphs.after_step()) is not None:
                capture()
        if not self._waiting:
            return False
        for request_id, output in self.scheduler.complete(_from_pb(self._read(self._waiting.pop(0)))):
            if output.error is not None:
                self.errors[request_id] = output.error
            else:
                self.outputs[request_id].append(output)
        return True

    def _launch(self, request: pb.StepRequest) -> PendingStep | pb.StepResponse:
        try:
            return self.engine.launch(request)
        except Exception as error:
            return _failed(request.id, error)

    def _read(self, pending: PendingStep | pb.StepResponse) -> pb.StepResponse:
        if isinstance(pending, pb.StepResponse):
            return pending
        try:
            self.faults.pass_or_fail("read")
            return pending.read()
        except Exception as error:
            return _failed(pending.step_id, error)

    def check_empty(self) -> None:
        """No row and no block is lost when nobody runs."""
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.queue and not self._waiting
        assert scheduler.kv_usage == 0 and len(scheduler._free_rows) == scheduler.limits.max_rows
