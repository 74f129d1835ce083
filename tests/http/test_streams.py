from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from legato.api.errors import ClientGone, GenerationFailed
from legato.http.streams import MAX_UNREAD, Piece, Stream, StreamGroup, Transcript
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.text.detokenize import Vocabulary
from tests.http.asgi import EOS, FakeBackend, outputs_of, token_ids, tokenizer

VOCABULARY = Vocabulary(tokenizer())
LENGTH, EOS_TOKEN, STOP = FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE


def transcribe(
    outputs: Iterable[Output], stop: Iterable[str] = (), *, include_stop: bool = True
) -> tuple[Transcript, list[Piece]]:
    transcript = Transcript(VOCABULARY, [], tuple(stop), include_stop=include_stop)
    pieces = []
    for output in outputs:
        pieces.append(transcript.add(output))
        if transcript.finish_reason is not None:
            break
    return transcript, pieces


# ---- Transcript ------------------------------------------------------------------------------------------------------


def test_the_end_token_is_shown_but_not_part_of_the_text() -> None:
    transcript, pieces = transcribe(outputs_of("hello world"))
    assert transcript.text == "hello world"
    assert transcript.finish_reason is EOS_TOKEN
    assert (pieces[-1].token.text, pieces[-1].token.special) == ("</s>", True)
    assert transcript.num_tokens == len(pieces) == len(token_ids("hello world")) + 1


def test_half_a_character_at_the_end_comes_with_the_last_token() -> None:
    half = token_ids("é")[0]
    transcript, pieces = transcribe([Output(half), Output(EOS, finish_reason=EOS_TOKEN)])
    assert transcript.text == "\ufffd"
    assert [piece.token.text for piece in pieces] == ["", "\ufffd</s>"]


def test_a_stop_string_inside_a_token_cuts_token_and_text() -> None:
    world = token_ids(" world")
    assert len(world) == 1
    transcript, pieces = transcribe(outputs_of("hello world again"), ["wor"])
    assert transcript.text == "hello wor"
    assert transcript.finish_reason is STOP
    assert pieces[-1].token.id == world[0]
    assert "".join(piece.token.text for piece in pieces) == transcript.text


def test_a_stop_string_across_tokens() -> None:
    transcript, _ = transcribe(outputs_of("hello world again"), ["llo wor"])
    assert transcript.text == "hello wor"


def test_a_stop_string_may_be_left_out() -> None:
    transcript, pieces = transcribe(outputs_of("hello world again"), ["o world"], include_stop=False)
    assert transcript.text == "hell"
    assert "".join(piece.token.text for piece in pieces) == "hell"


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    transcript, pieces = transcribe(outputs_of("hello wo", LENGTH), ["world"], include_stop=False)
    assert transcript.text == "hello wo"
    assert "".join(piece.text for piece in pieces) == "hello wo"


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_special_token_can_be_a_stop_string(include_stop: bool) -> None:
    outputs = [*outputs_of("hello", LENGTH), *outputs_of(" world")]
    outputs[len(token_ids("hello")) - 1] = Output(EOS)  # ignored end of sequence in the middle
    before = tokenizer().decode(token_ids("hello")[:-1])
    transcript, pieces = transcribe(outputs, ["</s>"], include_stop=include_stop)
    assert transcript.finish_reason is STOP
    assert transcript.text == before
    assert "".join(piece.token.text for piece in pieces) == (before + "</s>" if include_stop else before)


def test_the_schedulers_reason_comes_first() -> None:
    transcript, _ = transcribe(outputs_of("hello", LENGTH), ["o"])
    assert transcript.finish_reason is LENGTH
    assert transcript.text == "hello"


def test_top_tokens_have_texts() -> None:
    (hello, *_), bias = token_ids("hello"), -1.5
    output = Output(hello, top_tokens=[(hello, bias), (EOS, -2.0)], finish_reason=LENGTH)
    _, (piece,) = transcribe([output])
    assert [(token.id, token.text, token.logprob, token.special) for token in piece.top_tokens] == [
        (hello, VOCABULARY.text(hello), bias, False),
        (EOS, "</s>", -2.0, True),
    ]


# ---- Stream ----------------------------------------------------------------------------------------------------------


def stream_of(backend: FakeBackend, stop: Iterable[str] = (), request_id: int = 7) -> Stream:
    request = GenerationRequest(id=request_id, input_ids=[0, 5], max_new_tokens=20)
    stream = Stream(backend, request, Transcript(VOCABULARY, request.input_ids, tuple(stop)))
    stream.start()
    return stream


def test_the_whole_generation() -> None:
    async def main() -> None:
        stream = stream_of(FakeBackend())
        pieces = await stream.read_all()
        assert stream.transcript.text == "hello world"
        assert len(pieces) == stream.transcript.num_tokens
        assert stream.first_token_at is not None

    asyncio.run(main())


def test_tokens_come_one_by_one() -> None:
    async def main() -> None:
        stream = stream_of(FakeBackend())
        while stream.transcript.finish_reason is None:
            assert len(await stream.read()) == 1

    asyncio.run(main())


def test_a_stop_string_cancels_the_request() -> None:
    async def main() -> None:
        backend = FakeBackend()
        stream = stream_of(backend, ["hello"])
        await stream.read_all()
        assert backend.cancelled == [7]
        assert stream.transcript.text == "hello"

    asyncio.run(main())


def test_a_request_that_ended_is_not_cancelled() -> None:
    async def main() -> None:
        backend = FakeBackend()
        stream = stream_of(backend)
        await stream.read_all()
        stream.cancel()
        assert backend.cancelled == []

    asyncio.run(main())


def test_cancelling_wakes_the_reader() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=0)
        stream = stream_of(backend)
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(ClientGone):
            await reader
        stream.cancel()
        assert backend.cancelled == [7]

    asyncio.run(main())


def test_tokens_before_an_error_arrive_before_it() -> None:
    async def main() -> None:
        stream = stream_of(FakeBackend(script=lambda request: []))
        stream.receive(Output(token_ids("x")[0]))
        stream.receive(Output(error="shard 0 died"))
        assert [piece.token.text for piece in await stream.read()] == ["x"]
        with pytest.raises(GenerationFailed, match="Request failed during generation: shard 0 died"):
            await stream.read()

    asyncio.run(main())


def test_several_tokens_of_one_step_and_what_follows_a_stop_string() -> None:
    async def main() -> None:
        backend = FakeBackend(script=lambda request: [])
        stream = stream_of(backend, ["b"])
        for token_id in token_ids("0b1"):
            stream.receive(Output(token_id))
        assert [piece.token.text for piece in await stream.read()] == ["0", "b"]
        assert stream.transcript.finish_reason is STOP
        assert backend.cancelled == [7]

    asyncio.run(main())


@pytest.mark.parametrize("last", [Output(5, finish_reason=LENGTH), Output(error="shard 0 died"), None])
def test_tokens_may_wait_for_those_before_them_and_ends_do_not(last: Output | None) -> None:
    async def main() -> None:
        stream = stream_of(FakeBackend(script=lambda request: []))
        let_go_on: list[Callable[[], None]] = []

        def waits(go_on: Callable[[], None]) -> bool:
            let_go_on.append(go_on)
            return True

        group = StreamGroup([stream], waits)
        reader = asyncio.create_task(group.read())
        await asyncio.sleep(0)
        for _ in range(3):
            stream.receive(Output(5))
        await asyncio.sleep(0)
        assert not reader.done()
        if last is None:
            let_go_on[0]()
        else:
            stream.receive(last)
        ((_, pieces),) = await asyncio.wait_for(reader, 5)
        assert len(pieces) == 3 + (last is not None and last.error is None)

    asyncio.run(main())


def test_a_reader_whom_another_choice_has_woken_is_not_woken_for_nothing() -> None:
    async def main() -> None:
        backend, let_go_on = FakeBackend(script=lambda request: []), list[Callable[[], None]]()

        def waits(go_on: Callable[[], None]) -> bool:
            let_go_on.append(go_on)
            return True

        first, second = stream_of(backend), stream_of(backend, request_id=8)
        group = StreamGroup([first, second], waits)
        first.receive(Output(5))
        second.receive(Output(5, finish_reason=LENGTH))
        assert [number for number, _ in await group.read()] == [0, 1]
        reader = asyncio.create_task(group.read())
        await asyncio.sleep(0)
        (go_on,) = let_go_on
        go_on()
        await asyncio.sleep(0.01)
        assert not reader.done()
        first.receive(Output(5, finish_reason=LENGTH))
        assert len(await reader) == 1

    asyncio.run(main())


def test_a_client_who_does_not_read_is_given_up() -> None:
    async def main() -> None:
        backend, aborted = FakeBackend(script=lambda request: []), list[bool]()
        stream = stream_of(backend)
        stream.on_overrun = lambda: aborted.append(True)
        for _ in range(MAX_UNREAD):
            stream.receive(Output(5))
        assert (backend.cancelled, aborted) == ([], [])
        stream.receive(Output(5))
        stream.receive(Output(5))
        assert (backend.cancelled, aborted) == ([7], [True])
        with pytest.raises(ClientGone):
            await stream.read()

    asyncio.run(main())


def test_a_whole_answer_may_be_longer_than_what_a_client_may_leave_unread() -> None:
    async def main() -> None:
        outputs = [Output(5) for _ in range(MAX_UNREAD + 1)] + outputs_of("x")
        backend = FakeBackend(script=lambda request: [])
        stream = stream_of(backend)
        reading = asyncio.create_task(stream.read_all())
        await asyncio.sleep(0)
        for output in outputs:
            stream.receive(output)
        assert len(await reading) == len(outputs)
        assert backend.cancelled == []

    asyncio.run(main())


def test_the_prompt_and_its_logprobs() -> None:
    async def main() -> None:
        request = GenerationRequest(id=1, input_ids=[0, *token_ids("x")], max_new_tokens=1, prompt_logprobs=True)
        stream = Stream(FakeBackend(script=lambda request: []), request, Transcript(VOCABULARY, []))
        stream.receive(Output(EOS, prompt_logprobs=[None, -2.5], finish_reason=EOS_TOKEN))
        prefill = stream.prefill(VOCABULARY)
        assert [(token.text, token.logprob) for token in prefill] == [("<s>", None), ("x", -2.5)]

    asyncio.run(main())
