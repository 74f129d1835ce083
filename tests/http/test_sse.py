from __future__ import annotations

import asyncio
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from legato.api.errors import GenerationFailed
from legato.api.native import StreamResponse, Token
from legato.http import sse
from legato.http.streams import Stream, Transcript
from legato.scheduling.state import GenerationRequest
from tests.http.asgi import FakeBackend
from tests.http.test_streams import VOCABULARY

tokens = st.builds(
    Token,
    id=st.integers(0, 2**32 - 1),
    text=st.text(),
    logprob=st.floats() | st.none(),
    special=st.booleans(),
)


@given(st.integers(1, 2**32 - 1), tokens)
def test_the_quick_way_writes_what_the_encoder_writes(index: int, token: Token) -> None:
    encoded = msgspec.json.encode(StreamResponse(index=index, token=token))
    assert sse.token_event(index, token) == b"data: " + encoded + b"\n\n"


@given(tokens)
def test_an_event_is_one_line(token: Token) -> None:
    event = sse.token_event(1, token)
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2] and b"\r" not in event
    assert json.loads(event.removeprefix(b"data: "))["token"]["text"] == token.text


def test_an_error_is_an_event_too() -> None:
    assert sse.error_event(GenerationFailed("out of luck")) == (
        b'data: {"error":"Request failed during generation: out of luck","error_type":"generation"}\n\n'
    )


def test_silence_wakes_the_reader_and_tokens_put_that_off() -> None:
    async def main() -> None:
        request = GenerationRequest(id=1, input_ids=[0], max_new_tokens=1)
        stream = Stream(FakeBackend(pause_after=0), request, Transcript(VOCABULARY, []))
        keep_alive = sse.KeepAlive(stream, interval=0.05)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.03)
        keep_alive.sent()
        sent_at = loop.time()
        assert await stream.read() == []
        assert loop.time() - sent_at >= 0.045
        assert await stream.read() == []
        keep_alive.close()

    asyncio.run(main())
