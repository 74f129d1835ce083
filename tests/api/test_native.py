from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from legato.api.errors import InvalidRequest, MalformedBody, RequestError
from legato.api.native import (
    CompatGenerateRequest,
    Details,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
    Token,
)
from legato.http.exchange import decode
from legato.scheduling.state import FinishReason

DECODER = msgspec.json.Decoder(GenerateRequest)


def parse(body: bytes) -> GenerateRequest:
    return decode(body, DECODER)


def parse_parameters(**parameters: Any) -> GenerateParameters | None:
    return parse(json.dumps({"inputs": "x", "parameters": parameters}).encode()).parameters


def test_every_parameter_takes_null_for_its_default() -> None:
    names = GenerateParameters.__struct_fields__
    parameters = parse_parameters(**dict.fromkeys(names))
    assert all(getattr(parameters, name) is None for name in names)
    assert parse(b'{"inputs": "x", "parameters": null}').parameters is None


def test_unknown_fields_are_ignored() -> None:
    assert parse(b'{"inputs": "x", "model": "tgi", "parameters": {"mirostat": 2}}').inputs == "x"


def test_the_stream_flag_belongs_to_the_compat_route() -> None:
    request = decode(b'{"inputs": "x", "stream": true}', msgspec.json.Decoder(CompatGenerateRequest))
    assert request.stream is True


def test_token_ids_of_logit_bias_are_strings_in_json() -> None:
    parameters = parse_parameters(logit_bias={"17": -100, "4": 1.5})
    assert parameters is not None and parameters.logit_bias == {17: -100.0, 4: 1.5}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"inputs=x",
        b'{"inputs": "x"} trailing',
        b'{"inputs": NaN}',
        b'{"inputs": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"inputs": "x", "parameters": {"temperature": Infinity}}',
        b'{"inputs": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"inputs": "x", "parameters": {"grammar": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody) as error:
        parse(body)
    assert error.value.status == 400 and error.value.error_type == "validation"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{}", "inputs"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'{"inputs": 1}', "$.inputs"),
        (b'{"inputs": null}', "$.inputs"),
        (b'{"inputs": ["a"]}', "$.inputs"),
        (b'{"inputs": "x", "parameters": []}', "$.parameters"),
        (b'{"inputs": "x", "parameters": {"temperature": "hot"}}', "$.parameters.temperature"),
        (b'{"inputs": "x", "parameters": {"temperature": 1e999}}', "$.parameters.temperature"),
        (b'{"inputs": "x", "parameters": {"top_k": 9999999999}}', "$.parameters.top_k"),
        (b'{"inputs": "x", "parameters": {"top_k": 1.5}}', "$.parameters.top_k"),
        (b'{"inputs": "x", "parameters": {"max_new_tokens": -1}}', "$.parameters.max_new_tokens"),
        (b'{"inputs": "x", "parameters": {"max_new_tokens": 9223372036854775808}}', "$.parameters.max_new_tokens"),
        (b'{"inputs": "x", "parameters": {"seed": ' + b"9" * 5000 + b"}}", "$.parameters.seed"),
        (b'{"inputs": "x", "parameters": {"stop": "x"}}', "$.parameters.stop"),
        (b'{"inputs": "x", "parameters": {"stop": [1]}}', "$.parameters.stop"),
        (b'{"inputs": "x", "parameters": {"do_sample": "yes"}}', "$.parameters.do_sample"),
        (b'{"inputs": "x", "parameters": {"logit_bias": {"a": 1}}}', "$.parameters.logit_bias"),
        (rb'{"inputs": "\ud800"}', "unpaired surrogates"),
        (rb'{"inputs": "\udc00\ud800"}', "unpaired surrogates"),
    ],
)
def test_json_of_another_shape_is_invalid_and_the_field_is_named(body: bytes, named: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(body)
    assert error.value.status == 422
    assert str(error.value).startswith("Input validation error: ")
    assert named in str(error.value)


def test_an_error_is_tgis_object() -> None:
    error: RequestError = InvalidRequest("`inputs` cannot be empty")
    assert json.loads(error.body) == {
        "error": "Input validation error: `inputs` cannot be empty",
        "error_type": "validation",
    }


def test_fields_come_in_tgis_order_and_absent_ones_are_left_out() -> None:
    token = Token(5, "a", -0.25, False)
    details = Details(finish_reason=FinishReason.LENGTH, generated_tokens=1, seed=None, prefill=[], tokens=[token])
    assert msgspec.json.encode(GenerateResponse(generated_text="a", details=details)) == (
        b'{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"seed":null,"prefill":[],'
        b'"tokens":[{"id":5,"text":"a","logprob":-0.25,"special":false}]}}'
    )
    assert msgspec.json.encode(GenerateResponse(generated_text="a")) == b'{"generated_text":"a"}'
    assert msgspec.json.encode(StreamResponse(index=1, token=token)) == (
        b'{"index":1,"token":{"id":5,"text":"a","logprob":-0.25,"special":false},"generated_text":null,"details":null}'
    )


def test_a_logprob_that_json_cannot_write_is_null() -> None:
    assert b'"logprob":null' in msgspec.json.encode(Token(1, "", float("-inf"), False))
