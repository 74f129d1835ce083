from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.chat.tools.json_text import JsonState, JsonText

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def accepted(text: str) -> JsonText | None:
    reader = JsonText()
    return reader if all(reader.feed(character) for character in text) else None


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_whatever_is_json_is_followed_to_its_end(value: object, ascii_only: bool, indent: int | None) -> None:
    reader = accepted("[" + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + "]")
    assert reader is not None
    assert reader.state is JsonState.DONE


@pytest.mark.parametrize(
    "text",
    [
        *["01", "1.e5", "--", "+1", ".5", "1e5.", "tru ", "nul}", "NaN", "'a'", "[-]", "[1.]"],
        *['{"a"1', '{"a":,', "[1,]", "[,", '{"a":1,}', "{1", "[}", '{"a":1]', "[1 2", '{"a" "b"', "{,", "]", '["a"] ]'],
        *['"\\x', '"\\u12g', '"a\nb'],
    ],
)
def test_what_no_json_begins_with_is_refused(text: str) -> None:
    assert accepted(text) is None


@given(st.text(alphabet='{}[]",:\\u0a1-.eE+ truefalsn', max_size=12))
def test_what_is_done_is_json(text: str) -> None:
    reader = accepted(text)
    if reader is not None and reader.state is JsonState.DONE:
        json.loads(text)
