"""What new shards get before requests go on there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from legato.common.restarts import RestartBudget
from legato.grammar.kinds import Grammar, GrammarKind
from legato.grammar.wire import grammar_type
from legato.pb import generate_pb2 as pb
from legato.router.recovery import ConnectedShards, Recovery
from legato.router.shards import ShardsLost
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import GenerationRequest, ModelLimits

FIRST, SECOND = Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.REGEX, "b+")


def request(number: int, grammar: Grammar) -> GenerationRequest:
    parameters = pb.NextTokenChooserParameters(grammar=grammar.value, grammar_type=grammar_type(grammar))
    return GenerationRequest(number, [1], 1, pb.Admission(parameters=parameters).SerializeToString())


class NewShards:
    """While they compile the first grammar, a request with another one comes."""

    def __init__(self, requests: list[GenerationRequest]) -> None:
        self.prepared: list[Grammar] = []
        self._requests = requests

    async def prepare(self, grammar: Grammar) -> None:
        if not self.prepared:
            self._requests.append(request(2, SECOND))
        self.prepared.append(grammar)

    def kill(self) -> None: ...

    async def close(self) -> None: ...


def test_grammars_of_requests_that_come_meanwhile_are_compiled_too() -> None:
    """Found by the simulation: a step would have waited for such a grammar, and failed its request if that is slow."""
    requests = [request(1, FIRST)]
    shards = NewShards(requests)
    resumed: list[Any] = []
    steps = SimpleNamespace(
        running=0,
        queue_size=1,
        scheduler=SimpleNamespace(requests=requests),
        resume=lambda *args: resumed.append((list(shards.prepared), args)),
    )

    async def connect() -> ConnectedShards:
        return ConnectedShards(shards, SchedulerLimits(65, 4, 4, 32), ModelLimits(63, 64, 256, 50))  # type: ignore[arg-type]

    recovery = Recovery(steps, shards, connect, RestartBudget(1))  # type: ignore[arg-type]
    asyncio.run(recovery(ShardsLost("lost shard 0")))
    assert [prepared for prepared, _ in resumed] == [[FIRST, SECOND]]
