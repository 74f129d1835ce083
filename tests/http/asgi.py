"""A client that calls an ASGI application directly, and a tokenizer and a backend to go with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from legato.api.dashboard import BlockUse, DashboardData, Distribution
from legato.grammar.kinds import Grammar
from legato.http.app import create_app
from legato.http.scheduler import AdapterChangeFailed, Receiver
from legato.ipc.messages import ServerLoad, ServerState
from legato.ipc.settings import RouterSettings
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import FinishReason, GenerationRequest, ModelLimits, Output, PromptChunk
from legato.telemetry.step_times import StepTimes

LIMITS = ModelLimits(
    max_input_tokens=64, max_total_tokens=100, max_batch_total_tokens=4096, vocab_size=400, eos_token_ids=frozenset({1})
)
SETTINGS = RouterSettings(model_id="tiny")
EOS = 1


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, puts <s> (0) before every prompt; </s> is 1."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["the quick brown fox jumps over the lazy dog, hello world"] * 10, trainer)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return trained


def token_ids(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def outputs_of(text: str, finish: FinishReason = FinishReason.EOS_TOKEN, logprob: float = -0.5) -> list[Output]:
    """The tokens of a text, the last of them with the finish reason; </s> after them if that is it."""
    ids = token_ids(text) + ([EOS] if finish is FinishReason.EOS_TOKEN else [])
    outputs = [Output(token_id=token_id, logprob=logprob) for token_id in ids]
    outputs[-1].finish_reason = finish
    return outputs


DASHBOARD = DashboardData(
    time=1.0,
    model_id="model",
    healthy=True,
    restarting=False,
    max_rows=4,
    num_running=2,
    num_waiting=0,
    oldest_waiting=0.0,
    running=[],
    waiting=[],
    blocks=BlockUse(block_size=16, total=9, running=4, cached=2, free=3),
    steps=[],
    generated_tokens=5,
    prompt_tokens=7,
    cached_tokens=0,
    preemptions=0,
    requests=2,
    successes=0,
    failures={},
    restarts={},
    replayed_requests=0,
    time_to_first_token=Distribution(bounds=[1.0], counts=[1, 0]),
    inter_token=Distribution(bounds=[1.0], counts=[4, 0]),
)


LOAD = ServerLoad(epoch="1", running=2, queued=3, max_rows=4, free_blocks=5, total_blocks=9, block_size=16)


# A guard against hangs, no limit of time: the machine may be busy.
HANG_SECONDS = 60.0


@dataclass
class FakeBackend:
    """Says what it was told to say, one output per turn of the event loop, to whoever asks."""

    script: Callable[[GenerationRequest], Iterable[Output]] = lambda request: outputs_of("hello world")
    limits: ModelLimits = LIMITS
    health: bool = True
    draining: bool = False
    # Stop after this many outputs and wait for `go_on`.
    pause_after: int | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    prepared: list[Grammar] = field(default_factory=list)
    queue_size: int = 3
    queue_age: float = 1.5
    running: int = 2
    max_running_tokens: int = 640
    kv_usage: float = 0.25
    step_times: StepTimes | None = None
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    # (name, source) of what was loaded and, without a source, unloaded; and what is said of it instead.
    changes: list[tuple[str, str | None]] = field(default_factory=list)
    refusal: AdapterChangeFailed | None = None
    chunks: dict[int, list[PromptChunk]] = field(default_factory=dict)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def change_adapter(self, name: str, source: str | None, revision: str | None = None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.changes.append((name, source if revision is None else f"{source}@{revision}"))

    def submit(self, request: GenerationRequest, receiver: Receiver) -> None:
        self.requests.append(request)
        self._tasks[request.id] = asyncio.create_task(self._run(request, receiver))

    async def _run(self, request: GenerationRequest, receiver: Receiver) -> None:
        for i, output in enumerate(self.script(request)):
            if i == self.pause_after:
                await self.go_on.wait()
            await asyncio.sleep(0)
            receiver(output)
        del self._tasks[request.id]

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def observe(self) -> bytes:
        return msgspec.json.encode(DASHBOARD)

    async def load(self) -> bytes:
        return msgspec.json.encode(LOAD)

    async def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)

    @property
    def state(self) -> ServerState:
        return ServerState(healthy=self.health, live=self.health, ready=self.health, draining=self.draining)

    async def drain(self) -> bytes:
        self.draining = True
        return b'{"draining":true,"running":2,"queued":3}'


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        blocks = [block for block in self.body.split(b"\n\n") if block.startswith(b"data: ")]
        return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


class Call:
    """One request in progress."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: Iterable[bytes] = (b"",),
        headers: dict[str, str] | None = None,
        client: str = "127.0.0.1",
        query: str = "",
    ) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        chunks = list(body)
        for i, chunk in enumerate(chunks):
            self._inbox.put_nowait({"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)})
        self.sent: list[Message] = []
        self._something_sent = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": (client, 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in ({"host": "test"} | (headers or {})).items()],
        }
        self.task: asyncio.Task[None] = asyncio.create_task(app(scope, self._inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._something_sent.set()

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def wait_for(self, num_messages: int) -> None:
        while len(self.sent) < num_messages:
            self._something_sent.clear()
            await asyncio.wait_for(self._something_sent.wait(), HANG_SECONDS)

    async def answer(self) -> Answer:
        await asyncio.wait_for(self.task, HANG_SECONDS)
        start, *bodies = self.sent
        assert not bodies[-1].get("more_body", False), "the answer was not finished"
        return Answer(
            status=start["status"],
            headers={k.decode(): v.decode() for k, v in start["headers"]},
            body=b"".join(message.get("body", b"") for message in bodies),
        )


async def call(app: ASGIApp, method: str, path: str, **request: Any) -> Answer:
    return await Call(app, method, path, **request).answer()


async def post(
    app: ASGIApp, path: str, body: Any, headers: dict[str, str] | None = None, client: str = "127.0.0.1"
) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(app, "POST", path, body=[data], headers=headers, client=client)


async def get(app: ASGIApp, path: str, headers: dict[str, str] | None = None) -> Answer:
    return await call(app, "GET", path, headers=headers)


def app_for(backend: FakeBackend | None = None, **settings: Any) -> ASGIApp:
    return create_app(backend or FakeBackend(), tokenizer(), replace(SETTINGS, **settings))


def ask(path: str, body: Any, backend: FakeBackend | None = None, **settings: Any) -> Answer:
    """One POST to an application of its own."""
    return asyncio.run(post(app_for(backend, **settings), path, body))


async def until(condition: Callable[[], object], turns: int = 2000) -> None:
    """Turn the event loop until something has happened."""
    for turn in range(turns):
        if condition():
            return
        await asyncio.sleep(0.001 if turn > 200 else 0)
    raise AssertionError("it never happened")
