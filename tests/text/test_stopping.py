from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.text.stopping import StopMatcher


def run(matcher: StopMatcher, pieces: Iterable[str]) -> str:
    return "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()


@pytest.mark.parametrize(
    ("pieces", "stops", "included", "excluded"),
    [
        (["a", "b", "c"], ["b"], "ab", "a"),
        (["Hello\n", "\nUs", "er: x"], ["\n\nUser:"], "Hello\n\nUser:", "Hello"),
        (["one END two"], ["END"], "one END", "one "),
        (["xEN", "EN", "D!"], ["END"], "xENEND", "xEN"),
        (["abc"], ["abcd", "bc"], "abc", "a"),
        (["abc"], ["bc", "abc"], "abc", ""),
        (["aab"], ["ab", "b"], "aab", "a"),
        (["aaa", "ab"], ["aab"], "aaaab", "aa"),
        (["no stop here"], ["zzz"], "no stop here", "no stop here"),
        (["half EN"], ["END"], "half EN", "half EN"),
        (["é", "日本", "語"], ["本語"], "é日本語", "é日"),
    ],
)
def test_the_text_ends_at_the_first_complete_stop_string(
    pieces: list[str], stops: list[str], included: str, excluded: str
) -> None:
    assert run(StopMatcher(stops), pieces) == included
    assert run(StopMatcher(stops, include=False), pieces) == excluded


def test_nothing_is_held_back_when_the_stop_string_is_part_of_the_text() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("E", "N", "D")] == ["E", "N", "D"]
    assert matcher.stopped


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["</s>"], include=False)
    assert matcher.feed("a <b> <") == "a <b> "
    assert matcher.feed("/") == ""
    assert matcher.feed("i>") == "</i>"
    assert not matcher.stopped


def test_text_after_the_stop_string_is_dropped() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a."
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""


def test_an_empty_stop_string_never_stops() -> None:
    matcher = StopMatcher([""])
    assert matcher.feed("abc") == "abc"
    assert not matcher.stopped


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


letters = st.text("abc", max_size=4)


@given(st.lists(letters, max_size=12), st.lists(letters, max_size=4))
def test_token_borders_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    found = first_stop(text, stops)
    including, excluding = StopMatcher(stops), StopMatcher(stops, include=False)
    assert run(including, pieces) == (text if found is None else text[: found[1]])
    assert run(excluding, pieces) == (text if found is None else text[: found[0]])
    assert including.stopped == excluding.stopped == (found is not None)


def test_a_stop_string_as_long_as_a_request_stays_cheap() -> None:
    matcher = StopMatcher(["ab" * 500_000 + "c"])
    for _ in range(2_000):
        matcher.feed("ab")
    assert not matcher.stopped
