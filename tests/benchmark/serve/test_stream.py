"""Events of the usual servers, read as a client that counts tokens."""

from __future__ import annotations

import pytest

from legato.benchmark.serve.client import StreamError, TokenStream, error_text

TOKEN = b'data:{"index":1,"token":{"id":5,"text":"a","logprob":-1.0,"special":false},"generated_text":null}\n\n'
LAST = (
    b'data: {"token":{"id":6,"text":"b","logprob":-1.0,"special":false},"generated_text":"ab",'
    b'"details":{"finish_reason":"length","generated_tokens":2,"input_length":7}}\n\n'
)


def completion(text: str, reason: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (text.encode(), reason.encode())


def chat(delta: str, reason: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (delta.encode(), reason.encode())


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\ndata: [DONE]\n\n'


def read(*pieces: bytes) -> TokenStream:
    """A piece every second."""
    stream = TokenStream()
    for second, piece in enumerate(pieces, 1):
        stream.feed(piece, float(second))
    return stream


def test_tokens_and_gaps_of_tgi() -> None:
    stream = read(TOKEN, b":\n\n", LAST)
    assert (stream.first, stream.gaps, stream.num_tokens, stream.num_prompt) == (1.0, [2.0], 2, 7)
    assert stream.complete


def test_a_stream_that_was_not_closed_is_not_complete() -> None:
    assert not read(TOKEN).complete
    assert not read(completion("a")).complete


def test_events_may_arrive_in_pieces() -> None:
    whole = TOKEN + LAST
    stream = read(*(whole[start : start + 7] for start in range(0, len(whole), 7)))
    assert (stream.num_tokens, stream.complete) == (2, True)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    assert read(TOKEN, TOKEN + TOKEN).gaps == [1.0, 0.0]


def test_the_servers_own_count_beats_that_of_the_events() -> None:
    stream = read(completion("two words"), completion("more", '"length"'), USAGE)
    assert (stream.num_events, stream.num_tokens, stream.num_prompt, stream.complete) == (2, 4, 9, True)


def test_half_a_character_is_a_token_and_the_end_of_a_completion_is_not() -> None:
    assert read(completion(""), completion("é"), completion("", '"stop"')).num_events == 2


def test_role_and_reason_of_a_chat_are_no_tokens() -> None:
    role, end = chat('{"role":"assistant","content":""}'), chat("{}", '"stop"')
    stream = read(role, chat('{"content":"a"}'), chat('{"reasoning_content":"b"}'), end)
    assert (stream.first, stream.num_events) == (2.0, 2)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b'data: {"error":"overloaded","error_type":"overloaded"}\n\n', "error in the stream", "overloaded"),
        (b'data: {"error":{"message":"no memory"}}\n\n', "error in the stream", "no memory"),
        (b"data: {nonsense\n\n", "malformed event", "nonsense"),
    ],
)
def test_errors_in_a_stream_have_a_kind_and_words(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(StreamError, match=words) as caught:
        read(data)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":"too long","error_type":"validation"}', "too long"),
        (b'{"error":{"message":"who?","type":"auth"}}', "who?"),
        (b'{"object":"error","message":"no such model"}', "no such model"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
    ],
)
def test_refusals_are_read_in_every_dialect(body: bytes, words: str) -> None:
    assert error_text(body) == words
