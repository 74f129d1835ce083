"""Parameters: what the wire means, what a row costs, what arithmetic can take."""

from __future__ import annotations

import math

import pytest

from legato.pb import generate_pb2
from legato.sampling.params import Feature, SamplingParams

NAN, INF = math.nan, math.inf


def test_an_empty_message_is_the_default() -> None:
    assert SamplingParams.from_pb(generate_pb2.NextTokenChooserParameters()) == SamplingParams()


def test_a_message_keeps_what_it_sets() -> None:
    pb = generate_pb2.NextTokenChooserParameters(
        do_sample=True, temperature=0.5, top_k=7, min_p=0.25, seed=2**64 - 1, token_bias={3: -1.5}
    )
    params = SamplingParams.from_pb(pb, top_n_tokens=4)
    assert params == SamplingParams(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        min_p=0.25,
        seed=2**64 - 1,
        token_bias={3: -1.5},
        top_n_tokens=4,
    )


def test_the_defaults_use_nothing() -> None:
    assert not SamplingParams().features()


def test_a_row_that_does_not_sample_uses_no_filter() -> None:
    params = SamplingParams(temperature=0.5, top_k=5, top_p=0.5, typical_p=0.5, min_p=0.5)
    assert not params.features()


def test_a_row_that_samples_uses_what_differs_from_the_defaults() -> None:
    params = SamplingParams(do_sample=True, top_k=5, presence_penalty=0.1, top_n_tokens=1)
    assert params.features() == {Feature.SAMPLE, Feature.TOP_K, Feature.COUNTS, Feature.TOP_TOKENS}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (SamplingParams(temperature=0.0), SamplingParams(temperature=1e-8)),
        (SamplingParams(temperature=INF), SamplingParams(temperature=1e8)),
        (SamplingParams(temperature=NAN), SamplingParams()),
        (SamplingParams(top_p=2.0, typical_p=NAN, min_p=-1.0), SamplingParams()),
        (SamplingParams(repetition_penalty=-3.0), SamplingParams(repetition_penalty=1e-6)),
        (SamplingParams(token_bias={1: -INF, 2: NAN}), SamplingParams(token_bias={1: -1e6, 2: 0.0})),
        (SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=0.7, seed=3)),
    ],
)
def test_bounded_takes_the_nearest_number_that_cannot_overflow(given: SamplingParams, taken: SamplingParams) -> None:
    assert given.bounded() == taken
