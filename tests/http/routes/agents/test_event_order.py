"""Random generations through both APIs, whole, cut off, failed and cancelled: events come in the published order.

`EVENT_CASES` says how many there are; `make fuzz` has 2,000.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import pytest

from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.http.asgi import LIMITS, Call, FakeBackend, outputs_of, post, until
from tests.http.routes.agents.machines import MessageMachine, ResponseMachine, events_of
from tests.http.routes.openai.fakes import FakeTemplate, Server

CASES = int(os.environ.get("EVENT_CASES", "60"))
ROOMY = type(LIMITS)(
    max_input_tokens=4000, max_total_tokens=8000, max_batch_total_tokens=16000, vocab_size=400,
    eos_token_ids=LIMITS.eos_token_ids,
)  # fmt: skip
FUNCTION: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>',
)


def random_text(rng: random.Random) -> str:
    """Reasoning, words and calls, in an order that a model may think of, with some broken markers."""
    words = ["hello ", "wörld ", "<think", "</think>", "{", "\n\n", "x", "<tool_call>", "😀 "]

    def said(most: int) -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(most)))

    reasoning = f"<think>\n{said(6)}\n</think>\n\n" if rng.random() < 0.6 else ""
    calls = "\n".join(rng.choice(CALLS) for _ in range(rng.randrange(3)))
    return reasoning + said(8) + calls or "x"


def script_of(rng: random.Random) -> list[Output]:
    finish = rng.choice([FinishReason.EOS_TOKEN, FinishReason.EOS_TOKEN, FinishReason.LENGTH])
    outputs = outputs_of(random_text(rng), finish)
    if rng.random() < 0.2:
        place = rng.randrange(len(outputs))
        outputs = [*outputs[:place], Output(error="the shard is gone")]
    return outputs


def bodies(rng: random.Random) -> list[tuple[str, Any]]:
    tools = rng.random() < 0.7
    message: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
    response: dict[str, Any] = {"input": "hi", "store": rng.random() < 0.5}
    if tools:
        message["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "patch")]
        response["tools"] = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch"}]
    if rng.random() < 0.5:
        message["thinking"] = {"type": "adaptive"}
        response["reasoning"] = {"summary": "auto"}
    return [("/v1/messages", message | {"stream": True}), ("/v1/responses", response | {"stream": True})]


def check(path: str, body: Any, received: bytes, *, whole: bool) -> None:
    machine: MessageMachine | ResponseMachine
    machine = MessageMachine() if path == "/v1/messages" else ResponseMachine(as_summary="reasoning" in body)
    for event in events_of(received):
        machine.take(event)
    assert machine.state == "over" or not whole


async def generations(seed: int, num_cases: int) -> int:
    rng = random.Random(seed)
    scripts: list[list[Output]] = []

    def script(request: GenerationRequest) -> list[Output]:
        return scripts.pop(0)

    template = FakeTemplate(text="<think></think><tool_call>")
    backend = FakeBackend(script, limits=ROOMY)
    server, num_cut = Server(backend, template), 0
    for _ in range(num_cases):
        for path, body in bodies(rng):
            scripts[:] = [script_of(rng)]
            if rng.random() < 0.8:
                answer = await post(server.app, path, body)
                if answer.status == 200:
                    check(path, body, answer.body, whole=True)
                else:  # failed before its first event
                    assert answer.status == 500
                continue
            num_cut += 1
            await cancelled(server, path, body, rng)
    assert not server.backend._tasks
    return num_cut


async def cancelled(server: Server, path: str, body: Any, rng: random.Random) -> None:
    """The client hangs up after some messages; what it got by then is in order."""
    call = Call(server.app, "POST", path, [json.dumps(body).encode()])
    wanted = rng.randrange(1, 6)
    await until(lambda: len(call.sent) >= wanted or call.task.done())
    call.hang_up()
    await asyncio.wait_for(call.task, 5)
    if call.sent and call.sent[0]["status"] == 200:
        received = b"".join(message.get("body", b"") for message in call.sent[1:])
        check(path, body, received, whole=False)


def test_events_come_in_the_order_of_the_published_schemas() -> None:
    num_cut = asyncio.run(generations(seed=1, num_cases=CASES))
    assert num_cut > CASES // 10


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_prompt_that_takes_long_is_told_in_events(path: str) -> None:
    """Agents give up on streams that have none for minutes, whatever comments say."""

    async def main() -> None:
        backend = FakeBackend(lambda request: outputs_of("hello"), limits=ROOMY)
        backend.pause_after = 0
        server = Server(backend, FakeTemplate(), {"keep_alive": 0.01})
        body = dict(bodies(random.Random(3)))[path]
        call = Call(server.app, "POST", path, [json.dumps(body).encode()])
        await until(lambda: len(call.sent) >= 6)
        backend.go_on.set()
        received = (await call.answer()).body
        kinds = [event["type"] for event in events_of(received)]
        kept_alive = {"/v1/messages": "ping", "/v1/responses": "response.in_progress"}[path]
        assert kinds[0] in ("message_start", "response.created") and kinds.count(kept_alive) >= 3
        check(path, body, received, whole=True)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_machines_notice_what_is_out_of_order(path: str) -> None:
    rng = random.Random(3)
    body = dict(bodies(rng))[path]
    server = Server(FakeBackend(lambda request: outputs_of("hello"), limits=ROOMY), FakeTemplate())
    received = asyncio.run(post(server.app, path, body)).body
    frames = received.split(b"\n\n")
    check(path, body, received, whole=True)
    for place in range(len(frames) - 2):
        swapped = [*frames[:place], frames[place + 1], frames[place], *frames[place + 2 :]]
        if frames[place].split(b"\n")[0] == frames[place + 1].split(b"\n")[0] == b"event: content_block_delta":
            continue  # two pieces of one text
        with pytest.raises(AssertionError):
            check(path, body, b"\n\n".join(swapped), whole=True)
