"""What OpenAI's way asks of transcripts and streams."""

from __future__ import annotations

import asyncio

import pytest

from legato.api.errors import ClientGone, GenerationFailed
from legato.http.streams import Stream, StreamGroup, Transcript
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.text.detokenize import Vocabulary
from tests.http.asgi import FakeBackend, outputs_of, token_ids, tokenizer

VOCABULARY = Vocabulary(tokenizer())
STOP, LENGTH, END = FinishReason.STOP_SEQUENCE, FinishReason.LENGTH, FinishReason.EOS_TOKEN


def transcribed(text: str, finish: FinishReason, include_stop: bool, **how: object) -> Transcript:
    transcript = Transcript(VOCABULARY, [], include_stop=include_stop, **how)  # type: ignore[arg-type]
    outputs = [Output(token_id) for token_id in token_ids(text)]
    outputs[-1].finish_reason = finish
    for output in outputs:
        transcript.add(output)
        if transcript.finish_reason is not None:
            break
    return transcript


@pytest.mark.parametrize("finish", [STOP, END])
def test_a_token_that_ends_the_text_is_part_of_it_only_if_stop_strings_are(finish: FinishReason) -> None:
    assert transcribed("hello world", finish, include_stop=True).text == "hello world"
    assert transcribed("hello world", finish, include_stop=False).text == "hello"
    assert transcribed("hello world", LENGTH, include_stop=False).text == "hello world"


def test_min_tokens_leaves_stop_strings_before_them_alone() -> None:
    both = transcribed("hello hello world", LENGTH, include_stop=False, stop=["hello"], min_tokens=2)
    assert (both.text, both.finish_reason) == ("hello ", STOP)


def stream_of(backend: FakeBackend, request_id: int) -> Stream:
    request = GenerationRequest(id=request_id, input_ids=[0], max_new_tokens=20)
    stream = Stream(backend, request, Transcript(VOCABULARY, []))
    stream.start()
    return stream


def silent() -> FakeBackend:
    return FakeBackend(script=lambda request: [])


def test_what_the_first_token_brings() -> None:
    async def main() -> None:
        stream = stream_of(silent(), 1)
        stream.receive(Output(5, num_cached=16, prompt_logprobs=[None], prompt_top_tokens=[None]))
        assert (stream.num_cached, stream.prompt_logprobs, stream.prompt_top_tokens) == (16, [None], [None])

    asyncio.run(main())


def test_one_step_wakes_a_group_once() -> None:
    async def main() -> None:
        streams = [stream_of(silent(), number) for number in range(3)]
        group = StreamGroup(streams)
        reader = asyncio.create_task(group.read())
        await asyncio.sleep(0)
        streams[2].receive(Output(token_ids("c")[0]))
        streams[0].receive(Output(token_ids("a")[0]))
        news = await reader
        assert [(number, [piece.text for piece in pieces]) for number, pieces in news] == [(0, ["a"]), (2, ["c"])]

    asyncio.run(main())


def test_a_group_ends_with_its_last_stream() -> None:
    async def main() -> None:
        backend = FakeBackend(lambda request: outputs_of("so " * request.id))
        group = StreamGroup([stream_of(backend, number) for number in (3, 1, 2)])
        while not group.ended:
            assert await group.read()

    asyncio.run(main())


def test_waking_one_stream_wakes_the_group() -> None:
    async def main() -> None:
        streams = [stream_of(silent(), number) for number in range(2)]
        reader = asyncio.create_task(StreamGroup(streams).read())
        await asyncio.sleep(0)
        streams[0].wake()
        assert await reader == []

    asyncio.run(main())


def test_errors_and_cancelled_streams_reach_the_groups_reader() -> None:
    async def main() -> None:
        streams = [stream_of(silent(), number) for number in range(2)]
        group = StreamGroup(streams)
        streams[1].receive(Output(error="boom"))
        with pytest.raises(GenerationFailed):
            await group.read()
        streams[0].cancel()
        with pytest.raises(ClientGone):
            await group.read()

    asyncio.run(main())
