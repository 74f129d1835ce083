"""Parameters: what the wire means, what a row costs, what arithmetic can take."""

from __future__ import annotations

import math

import pytest

from legato.pb.generate_pb2 import NextTokenChooserParameters
from legato.sampling.params import Column, Feature, RowParams

NAN, INF = math.nan, math.inf
DEFAULTS = {
    Column.temperature: 1.0, Column.top_k: 0.0, Column.top_p: 1.0, Column.typical_p: 1.0, Column.min_p: 0.0,
    Column.repetition_penalty: 1.0, Column.frequency_penalty: 0.0, Column.presence_penalty: 0.0,
}  # fmt: skip


def read(top_n_tokens: int = 0, **fields: object) -> RowParams:
    return RowParams.read(NextTokenChooserParameters(**fields), top_n_tokens)  # type: ignore[arg-type]


def test_an_empty_message_is_the_default() -> None:
    assert read() == RowParams()
    assert dict(zip(Column, RowParams().numbers, strict=True)) == DEFAULTS


def test_a_message_keeps_what_it_sets() -> None:
    params = read(
        4, do_sample=True, temperature=0.5, top_k=7, min_p=0.25, seed=2**64 - 1, token_bias={3: -1.5},
        min_new_tokens=3, end_token_ids=[7],
    )  # fmt: skip
    changed = {Column.temperature: 0.5, Column.top_k: 7.0, Column.min_p: 0.25}
    assert dict(zip(Column, params.numbers, strict=True)) == DEFAULTS | changed
    assert (params.seed, params.token_bias, params.top_n_tokens) == (2**64 - 1, ((3, -1.5),), 4)
    assert (params.min_new_tokens, params.end_token_ids, params.top_k) == (3, (7,), 7)


def test_the_defaults_use_nothing() -> None:
    assert not read().features


def test_a_row_that_does_not_sample_uses_no_filter() -> None:
    assert not read(temperature=0.5, top_k=5, top_p=0.5, typical_p=0.5, min_p=0.5).features


def test_a_row_that_samples_uses_what_differs_from_the_defaults() -> None:
    params = read(1, do_sample=True, top_k=5, presence_penalty=0.1)
    assert params.features == {Feature.SAMPLE, Feature.TOP_K, Feature.COUNTS, Feature.TOP_TOKENS}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"temperature": 1e-20}, {Column.temperature: 1e-8}),
        ({"temperature": INF}, {Column.temperature: 1e8}),
        ({"temperature": NAN}, {}),
        ({"top_p": 2.0, "typical_p": NAN, "min_p": -1.0}, {}),
        ({"repetition_penalty": -3.0}, {Column.repetition_penalty: 1e-6}),
        ({"frequency_penalty": -INF, "presence_penalty": NAN}, {Column.frequency_penalty: -1e6}),
        ({"temperature": 0.75, "seed": 3}, {Column.temperature: 0.75}),
    ],
)
def test_a_number_is_the_nearest_that_cannot_overflow(given: dict[str, float], taken: dict[Column, float]) -> None:
    assert dict(zip(Column, read(**given).numbers, strict=True)) == DEFAULTS | taken


def test_a_bias_is_the_nearest_that_cannot_overflow() -> None:
    assert dict(read(token_bias={1: -INF, 2: NAN}).token_bias) == {1: -1e6, 2: 0.0}
