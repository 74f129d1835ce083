"""Rows 14 to 16 of the fault table: prompts at their limit, stop strings anywhere, characters in pieces."""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from legato.http.streams import Transcript
from legato.scheduling.state import FinishReason, Output
from legato.text.detokenize import REPLACEMENT, Vocabulary, _token_bytes
from legato.text.stopping import StopMatcher
from tests.faults.scale import cases
from tests.http.asgi import LIMITS, FakeBackend, ask, outputs_of
from tests.http.asgi import tokenizer as asgi_tokenizer
from tests.http.routes.openai.fakes import COMPLETIONS, Server
from tests.text.test_detokenize import sentencepiece

# ---- row 14 ----------------------------------------------------------------------------------------------------------

ROOM = LIMITS.max_input_tokens


def prompt(num_tokens: int) -> str:
    """Digits are a token each, and the tokenizer puts one before them."""
    return "0" * (num_tokens - 1)


def test_a_prompt_of_exactly_the_limit_is_served() -> None:
    backend = FakeBackend()
    assert ask("/generate", {"inputs": prompt(ROOM)}, backend).status == 200
    assert len(backend.requests[0].input_ids) == ROOM


def test_one_token_more_is_refused_in_tgis_words() -> None:
    answer = ask("/generate", {"inputs": prompt(ROOM + 1)})
    assert answer.status == 422
    assert answer.json()["error"] == (
        f"Input validation error: `inputs` must have less than {ROOM} tokens. Given: {ROOM + 1}"
    )


def test_one_token_more_is_fine_where_the_request_says_to_cut_it() -> None:
    backend = FakeBackend()
    assert ask("/generate", {"inputs": prompt(ROOM + 1), "parameters": {"truncate": ROOM}}, backend).status == 200
    assert len(backend.requests[0].input_ids) == ROOM


def test_no_prompt_is_refused_in_tgis_words() -> None:
    for body in ({"inputs": ""}, {"inputs": "", "parameters": {"truncate": 5}}):
        answer = ask("/generate", body)
        assert (answer.status, answer.json()["error"]) == (422, "Input validation error: `inputs` cannot be empty")
    assert Server().ask(COMPLETIONS, {"prompt": ""}).status == 400
    assert Server().ask(COMPLETIONS, {"prompt": []}).status == 400
    assert Server().ask(COMPLETIONS, {"prompt": [[]]}).status == 400


@pytest.mark.parametrize("inputs", ["<s>", "</s>", "</s></s><s>"])
def test_a_prompt_of_nothing_but_special_tokens_is_a_prompt(inputs: str) -> None:
    backend = FakeBackend()
    assert ask("/generate", {"inputs": inputs}, backend).status == 200
    assert set(backend.requests[0].input_ids) <= {0, 1}


# ---- row 15 ----------------------------------------------------------------------------------------------------------


def test_ten_thousand_stop_strings_are_refused() -> None:
    answer = ask("/generate", {"inputs": "hi", "parameters": {"stop": [str(i) for i in range(10_000)]}})
    assert answer.status == 422
    assert answer.json()["error"].endswith("`stop` supports up to 4 stop sequences. Given: 10000")


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_of_a_megabyte_costs_next_to_nothing(include: bool) -> None:
    """Also where the whole answer is its beginning, so that it might be complete with the next token."""
    stop = "a" * 500_000 + "b" * 500_000
    for text in ("a" * 16, "ab" * 8, "x" * 16):
        matcher = StopMatcher([stop, stop[1:]], include=include)
        started = time.process_time()
        for _ in range(4096):
            matcher.feed(text)
        assert time.process_time() - started < 1.0
        assert not matcher.stopped


def test_a_long_stop_string_is_found_to_the_letter() -> None:
    stop = "".join(random.Random(0).choices("ab", k=100_000))
    text = "ab" + stop[:50_000] + stop + "rest"
    matcher = StopMatcher([stop], include=False)
    said = "".join(matcher.feed(text[i : i + 7]) for i in range(0, len(text), 7))
    assert matcher.stopped and said == text[: text.index(stop)]


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the text must end, character by character, as nobody would write it who is in a hurry."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def transcript_of(text: str, stops: list[str], include: bool, rng: random.Random) -> tuple[str, Transcript]:
    """Through tokens, so that stop strings begin and end in the middle of them, and in the middle of characters."""
    transcript = Transcript(_vocabulary(), [], stops, include_stop=include)
    ids = asgi_tokenizer().encode(text, add_special_tokens=False).ids
    if rng.random() < 0.5:
        ids = [_byte_ids()[byte] for byte in text.encode()]
    shown = []
    for i, token_id in enumerate(ids):
        last = i + 1 == len(ids)
        piece = transcript.add(Output(token_id=token_id, finish_reason=FinishReason.LENGTH if last else None))
        shown.append(piece.text)
        if transcript.finish_reason is not None:
            break
    return "".join(shown), transcript


@cache
def _vocabulary() -> Vocabulary:
    return Vocabulary(asgi_tokenizer())


@cache
def _byte_ids() -> dict[int, int]:
    """The tokens of single bytes."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    return {_token_bytes(letter)[0]: asgi_tokenizer().token_to_id(letter) for letter in letters}


@pytest.mark.parametrize("include", [True, False])
def test_no_stop_string_is_missed_wherever_tokens_begin_and_end(include: bool) -> None:
    """10,000 texts and stop strings of a small alphabet, so that they nearly match all the time."""
    rng = random.Random(15)
    num_stopped = 0
    for _ in range(5_000):
        alphabet = rng.choice(("ab", "abc", "aé🙂", "the quick", "<|/>"))
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        shown, transcript = transcript_of(text, stops, include, rng)
        found = first_stop(text, stops)
        if found is None:
            assert shown == text, (text, stops)
        else:
            num_stopped += 1
            assert shown == text[: found[1] if include else found[0]], (text, stops)
            assert transcript.finish_reason in (FinishReason.STOP_SEQUENCE, FinishReason.LENGTH)
    assert num_stopped > 1_000


def test_a_stop_string_over_the_border_of_tokens_ends_the_answer_of_a_server() -> None:
    text = "hello world, hello fox"
    for stop in ("lo wor", "d, h", "fox", "o f"):
        body = {"inputs": "x", "parameters": {"stop": [stop], "details": True}}
        answer = ask("/generate", body, FakeBackend(lambda request: outputs_of(text))).json()
        assert answer["generated_text"] == text[: text.index(stop) + len(stop)]
        assert answer["details"]["finish_reason"] == "stop_sequence"


# ---- row 16 ----------------------------------------------------------------------------------------------------------

CHARACTERS = ["a", " ", "\n", "é", "ß", "日", "語", "🙂", "👍🏽", "👩‍👩‍👧‍👦", "\u0301", "и", "\u200d", "<"]


@cache
def _tokens(kind: str) -> tuple[Tokenizer, Vocabulary, dict[int, int]]:
    """A tokenizer, its vocabulary, and its tokens of single bytes."""
    if kind == "byte level":
        return asgi_tokenizer(), _vocabulary(), _byte_ids()
    tokenizer = sentencepiece()
    return tokenizer, Vocabulary(tokenizer), {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_character_in_pieces_appears_whole_or_not_at_all(kind: str) -> None:
    """100,000 texts whose characters are cut into tokens of a byte each, or into whatever the tokenizer likes."""
    tokenizer, vocabulary, byte_ids = _tokens(kind)
    rng = random.Random(16)
    for _ in range(cases(full=50_000, quick=10_000)):
        ids: list[int] = []
        for character in rng.choices(CHARACTERS, k=rng.randint(1, 8)):
            if rng.random() < 0.5:
                ids += [byte_ids[byte] for byte in character.encode()]
            else:
                ids += tokenizer.encode(character, add_special_tokens=False).ids
        detokenizer = vocabulary.detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert detokenizer.flush() == ""
        assert not any(REPLACEMENT in piece for piece in pieces), ids
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False), ids


def test_a_character_that_never_becomes_whole_is_shown_at_the_end_only() -> None:
    _, vocabulary, byte_ids = _tokens("byte level")
    for character in ("é", "日", "🙂"):
        data = character.encode()
        for cut in range(1, len(data)):
            detokenizer = vocabulary.detokenizer()
            said = "".join(detokenizer.push(byte_ids[byte]) for byte in b"ok " + data[:cut])
            assert said == "ok "
            assert detokenizer.flush() == REPLACEMENT


def test_a_stream_shows_an_emoji_of_four_tokens_with_the_last_of_them() -> None:
    script = [Output(token_id=_byte_ids()[byte]) for byte in "🙂".encode()]
    script[-1].finish_reason = FinishReason.LENGTH
    answer: Any = ask("/generate_stream", {"inputs": "x"}, FakeBackend(lambda request: script))
    assert [event["token"]["text"] for event in answer.events()] == ["", "", "", "🙂"]
