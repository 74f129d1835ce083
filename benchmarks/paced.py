"""A yardstick for the router: a bare ASGI application that streams events as tokens come, and does nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

NUM_EVENTS = 32
EVENT = (
    b'data: {"index":1,"token":{"id":1234,"text":" hello","logprob":-1.2345678,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
BODY = {"type": "http.response.body", "body": EVENT, "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """One event per turn of the event loop."""
    while (await receive()).get("more_body", False):
        pass
    await send(START)
    for _ in range(NUM_EVENTS):
        await asyncio.sleep(0)
        await send(BODY)
    await send(END)
