"""The messages between the scheduler and its HTTP workers. Sent over a `Link`, many at a time.

Tokens are the only thing there is much of: all that a step has for one worker is one message of parallel lists. What
few outputs have (a finish reason, an error, top tokens, the prompt's logprobs) stands aside, with its place in them.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from legato.grammar.kinds import Grammar
from legato.ipc.settings import RouterSettings
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import GenerationRequest, ModelLimits, Output, PromptChunk
from legato.telemetry.metrics import Figures

# ---- to a worker -----------------------------------------------------------------------------------------------------


class WorkerSetup(Struct, tag=0, array_like=True, frozen=True):
    """The first message: what can be loaded before anything is known of the shards."""

    logger_level: str
    json_output: bool
    model: str
    tokenizer_config_path: str | None
    payload_limit: int
    otlp_endpoint: str | None = None
    otlp_service_name: str = ""
    # --huggingface-hub-cache, where the base model of an adapter is.
    hub_cache: str | None = None


class ServerState(Struct, tag=6, array_like=True, frozen=True):
    """What the health routes say. Sent every second and with every change; answered with `Alive`."""

    # The shards are there, a token has come from them since the last failure, and steps advance.
    healthy: bool = False
    # No step is older than --hang-timeout. Also true while shards are replaced, which has limits of its own.
    live: bool = False
    # Requests can be admitted: healthy, and not draining.
    ready: bool = False
    restarting: bool = False
    draining: bool = False
    # Seconds for which the oldest step in flight has been computed.
    step_age: float = 0.0


class ServerLoad(Struct, frozen=True, kw_only=True):
    """What the scheduler has to do, for a balancer. Unused cached blocks count as free."""

    # Another value says that the prefix cache has been emptied.
    epoch: str
    running: int
    queued: int
    max_rows: int
    free_blocks: int
    total_blocks: int
    block_size: int


class Serve(Struct, tag=1, array_like=True, frozen=True):
    """The model is ready: let clients in."""

    limits: ModelLimits
    settings: RouterSettings
    # Requests are numbered from here on, which makes the numbers of all workers different.
    first_id: int
    # Seconds that requests get to finish at the end.
    grace: float
    state: ServerState
    adapters: list[AdapterInfo] = []


class Tokens(Struct, tag=2, array_like=True, frozen=True):
    """In the order in which they were generated. `rest` has (place, whole output) where there is more to an output."""

    request_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    rest: list[tuple[int, Output]]


class Answer(Struct, tag=3, array_like=True, frozen=True):
    """To the question with this number: yes or no, or text; `error` if there is none."""

    number: int
    value: bool | bytes = True
    error: str | None = None
    # The error is the fault of the grammar that was asked about, not ours.
    grammar_is_wrong: bool = False
    # The HTTP status of an error about an adapter.
    status: int = 0


class AskFigures(Struct, tag=4, array_like=True, frozen=True):
    """A scrape of the metrics. Answered with `Report`."""


class Drain(Struct, tag=5, array_like=True, frozen=True):
    """Accept no new requests, finish those that run, and exit."""


class ChunkDone(Struct, tag=7, array_like=True, frozen=True):
    """A part of a traced request's prompt is computed. Comes before the token that follows it."""

    request_id: int
    chunk: PromptChunk


class Adapters(Struct, tag=8, array_like=True, frozen=True):
    """The LoRA adapters that requests may name from now on."""

    adapters: list[AdapterInfo]


ToWorker: TypeAlias = WorkerSetup | Serve | Tokens | Answer | AskFigures | Drain | ServerState | ChunkDone | Adapters

# ---- to the scheduler ------------------------------------------------------------------------------------------------


class Loaded(Struct, tag=0, array_like=True, frozen=True):
    """The answer to `WorkerSetup`."""


class Serving(Struct, tag=1, array_like=True, frozen=True):
    """The answer to `Serve`."""


class Failed(Struct, tag=2, array_like=True, frozen=True):
    """The worker cannot begin, because of something that a person can mend."""

    message: str


class Submit(Struct, tag=3, array_like=True, frozen=True):
    request: GenerationRequest


class Cancel(Struct, tag=4, array_like=True, frozen=True):
    request_id: int


class Prepare(Struct, tag=5, array_like=True, frozen=True):
    """Answered when all shards have compiled the grammar."""

    number: int
    grammar: Grammar


class BeginDrain(Struct, tag=6, array_like=True, frozen=True):
    """Admit no more requests, in no worker. Answered with the requests that are left, as JSON."""

    number: int


class Scrape(Struct, tag=7, array_like=True, frozen=True):
    """Answered with the metrics of all processes, as text, or with the data of the dashboard, as JSON."""

    number: int
    dashboard: bool = False


class AskLoad(Struct, tag=11, array_like=True, frozen=True):
    """Answered with `ServerLoad`, as JSON."""

    number: int


class AskEvents(Struct, tag=12, array_like=True, frozen=True):
    """Answered with `KvEventPage` (`ipc/kv_events.py`), as JSON; with nothing if they are not recorded."""

    number: int
    # The last one that is known; None: none.
    after: int | None = None


class Report(Struct, tag=8, array_like=True, frozen=True):
    """What this worker has counted so far."""

    figures: Figures


class Alive(Struct, tag=9, array_like=True, frozen=True):
    """The answer to `ServerState`. A worker that does not give it for long is hung."""


class ChangeAdapter(Struct, tag=10, array_like=True, frozen=True):
    """Load a LoRA adapter from this source, or without one unload it. Answered when that is done."""

    number: int
    name: str
    source: str | None = None
    revision: str | None = None


# About the worker itself, and on behalf of its clients.
WorkerStatus: TypeAlias = Loaded | Serving | Failed | Report | Alive
ClientMessage: TypeAlias = Submit | Cancel | Prepare | BeginDrain | Scrape | AskLoad | AskEvents | ChangeAdapter
ToScheduler: TypeAlias = WorkerStatus | ClientMessage
