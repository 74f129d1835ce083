"""The seam between text and scheduling. The HTTP side gets a Backend and knows nothing of rows, blocks and shards."""

from __future__ import annotations

from typing import Protocol

from legato.scheduling.state import GenerationRequest, Grammar, ModelLimits, Output


class Sink(Protocol):
    """Where the tokens of one request go. Called on the event loop, and must not block."""

    def admitted(self) -> None:
        """The request got a row: its time in the queue is over. Later admissions, after preemption, may tell again."""
        ...

    def __call__(self, outputs: list[Output]) -> None:
        """At most once per step, with one output or more. The last of all has a finish reason or an error."""
        ...


class Backend(Protocol):
    """The scheduler and its shards: in this process, or at the other end of a link (`remote_backend.py`). Methods are
    called on the event loop; those that are not coroutines return at once."""

    @property
    def limits(self) -> ModelLimits: ...

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Take a valid request. Never refuses: whoever calls has taken a permit for it."""
        ...

    def cancel(self, request_id: int) -> None:
        """Give row and blocks back within one step; its sink is not called any more. Unknown ids are fine."""
        ...

    async def prepare(self, grammar: Grammar) -> None:
        """Have a grammar compiled before a request comes with it. GrammarError; LegatoError if the shards are lost."""
        ...

    async def healthy(self) -> bool: ...
