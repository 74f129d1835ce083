from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from legato.api.errors import InvalidRequest
from legato.api.native import GenerateParameters, GenerateRequest
from legato.http.validation import Validator, ValidRequest
from legato.pb import generate_pb2 as pb
from tests.generation import admission_of, parameters_of
from tests.http.asgi import LIMITS, SETTINGS, token_ids, tokenizer

VALIDATOR = Validator(tokenizer(), LIMITS, SETTINGS)
TEN_TOKENS = "0123456789"  # digits are never merged; <s> makes it eleven


def validate(
    inputs: str = "hello", *, streaming: bool = False, validator: Validator = VALIDATOR, **parameters: Any
) -> ValidRequest:
    request = GenerateRequest(inputs=inputs, parameters=GenerateParameters(**parameters))
    best_of = validator.num_sequences(request.parameters, streaming=streaming)
    return asyncio.run(validator.validate(request, best_of))


def problem(**request: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        validate(**request)
    return str(error.value).removeprefix("Input validation error: ")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"best_of": 2, "streaming": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 0, "streaming": True}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True, "streaming": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"temperature": -1.0}, "`temperature` must be strictly positive"),
        ({"temperature": 1e-50}, "`temperature` must be strictly positive"),
        ({"temperature": 1e300}, "`temperature` must fit in a 32-bit float. Given: 1e+300"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"presence_penalty": -2.1}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 1.01}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 2.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"min_p": -0.1}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"seed": 2**64}, "`seed` must be >= 0 and <= 18446744073709551615. Given: 18446744073709551616"),
        ({"seed": -1}, "`seed` must be >= 0 and <= 18446744073709551615. Given: -1"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 64. Given: 0"),
        ({"truncate": 65}, "`truncate` must be strictly positive and less than 64. Given: 65"),
        (
            {"inputs": TEN_TOKENS, "max_new_tokens": 90},
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 11 `inputs` tokens and 90 `max_new_tokens`",
        ),
        (
            {"inputs": TEN_TOKENS * 10, "max_new_tokens": 1},
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 101 `inputs` tokens and 1 `max_new_tokens`",
        ),
        (
            {"inputs": TEN_TOKENS * 10},
            "`inputs` tokens + `max_new_tokens` must be <= 100. Given: 101 `inputs` tokens and 0 `max_new_tokens`",
        ),
        ({"inputs": TEN_TOKENS * 7}, "`inputs` must have less than 64 tokens. Given: 71"),
        ({"grammar": {"type": "regex", "value": 5}}, "`grammar.value` must be a string"),
        ({"logit_bias": {400: 1.0}}, "`logit_bias` must have token ids >= 0 and < 400. Given: 400"),
        ({"logit_bias": {-1: 1.0}}, "`logit_bias` must have token ids >= 0 and < 400. Given: -1"),
        ({"logit_bias": {5: 101.0}}, "`logit_bias` must be >= -100 and <= 100. Given: 101.0 for 5"),
    ],
)
def test_each_rule_has_its_message(request_: dict[str, Any], message: str) -> None:
    assert problem(**request_) == message


# Each entry breaks one rule; TGI reports the first one broken, in this order.
ORDER: list[dict[str, Any]] = [
    {"best_of": 2},
    {"temperature": 0.0},
    {"repetition_penalty": 0.0},
    {"frequency_penalty": 3.0},
    {"top_p": 0.0},
    {"typical_p": 0.0},
    {"top_k": 0},
    {"max_new_tokens": 0},
    {"stop": list("abcde")},
    {"top_n_tokens": 6},
    {"inputs": ""},
    {"truncate": 0},
    {"grammar": {}},
]


@pytest.mark.parametrize("i", range(2, len(ORDER) - 1))
def test_the_first_broken_rule_is_reported(i: int) -> None:
    first, later = ORDER[i], {name: value for broken in ORDER[i + 1 :] for name, value in broken.items()}
    assert problem(**first, **later) == problem(**first)


def test_sampling_for_best_of_is_checked_before_the_parameters() -> None:
    # Any sampling parameter would count as sampling, so the next rule that can be broken is the penalty.
    assert problem(best_of=2, repetition_penalty=0.0) == problem(best_of=2)


def test_a_total_too_long_is_reported_before_an_input_too_long() -> None:
    assert "must be <= 100" in problem(inputs=TEN_TOKENS * 7, max_new_tokens=50)


def test_best_of_may_be_turned_off() -> None:
    validator = Validator(tokenizer(), LIMITS, replace(SETTINGS, max_best_of=1))
    assert problem(best_of=2, do_sample=True, validator=validator) == (
        "`best_of` != 1 is not allowed for this endpoint"
    )


def test_without_parameters_sampling_is_on_and_with_empty_ones_it_is_off() -> None:
    absent = asyncio.run(VALIDATOR.validate(GenerateRequest(inputs="x")))
    assert absent.parameters.do_sample
    assert not validate().parameters.do_sample


@pytest.mark.parametrize(
    "parameters", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.1}]
)
def test_a_filter_implies_sampling(parameters: dict[str, Any]) -> None:
    assert validate(**parameters).parameters.do_sample


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"top_p": 1.0}, {"typical_p": 1.0}, {"min_p": 0.0}])
def test_a_filter_at_its_neutral_value_is_accepted_and_means_nothing(parameters: dict[str, Any]) -> None:
    assert not validate(**parameters).parameters.do_sample


def unseeded(request: ValidRequest) -> pb.NextTokenChooserParameters:
    request.parameters.seed = 0
    return request.parameters


def test_null_means_the_default() -> None:
    names = GenerateParameters.__struct_fields__
    nulls: dict[str, Any] = dict.fromkeys(names)
    nothing = validate(**nulls)
    assert unseeded(nothing) == unseeded(validate())
    assert nothing.stop == () and not nothing.ignore_eos


def test_parameters_reach_the_scheduler() -> None:
    valid = validate(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.9, typical_p=0.8, min_p=0.1, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=0.4, watermark=True, seed=7, logit_bias={5: -1.0}, ignore_eos=True,
        top_n_tokens=2, decoder_input_details=True, max_new_tokens=9,
    )  # fmt: skip
    request = valid.generation(request_id=1, seed=valid.parameters.seed)
    sampling = parameters_of(request)
    floats = (sampling.temperature, sampling.top_p, sampling.typical_p, sampling.min_p)
    assert floats == pytest.approx((0.5, 0.9, 0.8, 0.1))
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    assert penalties == pytest.approx((1.2, 0.3, 0.4))
    assert (sampling.top_k, sampling.watermark, sampling.seed) == (3, True, 7)
    assert dict(sampling.token_bias) == {5: -1.0}
    assert (request.ignore_eos, request.prompt_logprobs, admission_of(request).top_n_tokens) == (True, True, 2)
    assert request.max_new_tokens == 9


def test_seeds_are_random_unless_given() -> None:
    assert validate(seed=2**64 - 1).parameters.seed == 2**64 - 1
    assert validate(do_sample=True).parameters.seed != validate(do_sample=True).parameters.seed


def test_prompts_begin_with_the_special_tokens_of_the_tokenizer() -> None:
    assert validate("hello").input_ids == [0, *token_ids("hello")]


def test_truncate_keeps_the_last_tokens() -> None:
    assert validate(TEN_TOKENS, truncate=3).input_ids == token_ids("789")
    assert validate(TEN_TOKENS, truncate=64).input_ids == [0, *token_ids(TEN_TOKENS)]


def test_long_texts_are_tokenized_like_short_ones() -> None:
    assert validate("hello " * 100, truncate=5).input_ids == [0, *token_ids("hello " * 100)][-5:]


def test_without_a_number_as_many_tokens_as_fit() -> None:
    assert validate(TEN_TOKENS).max_new_tokens == 89


def test_an_input_of_exactly_the_limit_is_accepted() -> None:
    assert len(validate("0" * 63).input_ids) == 64


def test_a_number_far_too_large_is_cut_to_what_fits_where_tgi_took_it() -> None:
    roomy = Validator(tokenizer(), replace(LIMITS, max_total_tokens=2000), SETTINGS)
    assert validate(TEN_TOKENS, max_new_tokens=2**32 - 1, validator=roomy).max_new_tokens == 1989
    assert "Given: 11 `inputs` tokens and 1024" in problem(inputs=TEN_TOKENS, max_new_tokens=2**32 - 1)


def test_a_text_that_the_tokenizer_swallows_is_empty() -> None:
    swallowing = type(tokenizer()).from_str(tokenizer().to_str())
    swallowing.normalizer = normalizers.Replace("x", "")
    swallowing.post_processor = None
    validator = Validator(swallowing, LIMITS, SETTINGS)
    assert problem(inputs="xxx", validator=validator) == "`inputs` cannot be empty"


def test_a_tokenizer_that_cuts_and_pads_by_itself_does_neither() -> None:
    eager = type(tokenizer()).from_str(tokenizer().to_str())
    eager.enable_truncation(4)
    eager.enable_padding(length=20)
    validator = Validator(eager, LIMITS, SETTINGS)
    assert validate(TEN_TOKENS, validator=validator).input_ids == [0, *token_ids(TEN_TOKENS)]


numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "temperature",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "top_p",
                "typical_p",
                "min_p",
            ]
        ),
        numbers.map(float),
    )
)
def test_whatever_is_accepted_survives_as_32_bit_floats(parameters: dict[str, Any]) -> None:
    try:
        sampling = validate(**parameters).parameters
    except InvalidRequest as error:
        assert any(f"`{name}`" in str(error) for name in parameters)
        return
    for value in (sampling.temperature, sampling.repetition_penalty, sampling.top_p, sampling.typical_p):
        assert struct.unpack("f", struct.pack("f", value))[0] > 0


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    """It would be an index out of range in the shard, and fail the step of everybody else too."""
    longer = Tokenizer.from_str(tokenizer().to_str())
    longer.add_tokens(["<late>"])
    validator = Validator(longer, replace(LIMITS, vocab_size=longer.get_vocab_size() - 1), SETTINGS)
    message = "'<late>', a token of the tokenizer that is not in the model's vocabulary"
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(validator.input_ids("hello <late>"))
    assert asyncio.run(validator.input_ids("hello"))
