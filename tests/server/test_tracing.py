"""A shard's spans: of steps with traced prompts, and of TGI's calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.router.shards import GrpcShards
from legato.server.fake.service import FakeService, StepCost
from legato.server.listening import listen
from legato.server.tracing import ShardSpans
from legato.telemetry.tracing import SpanKind, TraceContext
from tests.http.telemetry.test_tracing import Kept
from tests.server.fake.test_service import MODEL, answers, first_plan

PARENT = TraceContext(0xABC, 0xDEF)


def test_a_step_with_traced_prompts_has_spans_below_the_routers(tmp_path: Path) -> None:
    kept = Kept()

    async def main() -> None:
        service = FakeService(MODEL, [f"unix://{tmp_path / 's'}"], StepCost(), block_size=4)
        service.spans = ShardSpans(kept)
        server = await listen(service, str(tmp_path / "s"))
        shards = await GrpcShards.connect(str(tmp_path / "s"))
        plan = first_plan(3, prompt=4)
        plan.traces.append((1, PARENT.header))
        await answers(shards, [plan])
        await shards.close()
        await server.stop(None)

    asyncio.run(main())
    (call,), (forward,) = kept.named("Tokens"), kept.named("generate_token")
    assert (call.name, call.kind, call.parent_id) == ("Tokens", SpanKind.SERVER, PARENT.span_id)
    assert (forward.name, forward.parent_id) == ("generate_token", call.context.span_id)
    assert call.context.trace_id == forward.context.trace_id == PARENT.trace_id
    assert forward.attributes == {"legato.num_tokens": 4, "legato.batch_size": 3, "legato.step_tokens": 12}
    assert call.start_ns <= forward.start_ns <= forward.end_ns == call.end_ns


@pytest.mark.parametrize("parent", [PARENT, None])
def test_a_call_has_a_span_with_its_status(tmp_path: Path, parent: TraceContext | None) -> None:
    kept = Kept()

    async def main() -> None:
        service = FakeService(MODEL, [f"unix://{tmp_path / 's'}"], StepCost(), block_size=4)
        service.spans = ShardSpans(kept)
        server = await listen(service, str(tmp_path / "s"))
        metadata = [("traceparent", parent.header)] if parent else []
        async with grpc.aio.insecure_channel(f"unix://{tmp_path / 's'}") as channel:
            stub = rpc.TextGenerationServiceStub(channel)
            await stub.Info(pb.InfoRequest(), metadata=metadata)
            await stub.Health(pb.HealthRequest())
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Prefill(pb.PrefillRequest(), metadata=metadata)
        await server.stop(None)

    asyncio.run(main())
    info, prefill = kept.spans
    assert (info.name, prefill.name) == ("Info", "Prefill")
    assert info.parent_id == prefill.parent_id == (parent.span_id if parent else None)
    assert info.attributes["rpc.grpc.status_code"] == 0 and info.error is None
    assert prefill.attributes["rpc.grpc.status_code"] == grpc.StatusCode.UNIMPLEMENTED.value[0] and prefill.error
    assert info.attributes["net.transport"] == "unix"
