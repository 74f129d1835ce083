"""Requests as validation makes them, for tests that begin at the scheduler."""

from __future__ import annotations

from typing import Any

from legato.grammar.kinds import Grammar
from legato.grammar.wire import grammar_type
from legato.http.validation import ValidRequest
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import GenerationRequest
from legato.vision.prompts import PromptImage


def sampling(**fields: Any) -> pb.NextTokenChooserParameters:
    """As validation writes them: what is not set is the identity."""
    bias = fields.pop("logit_bias", {})
    defaults = dict(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0)
    return pb.NextTokenChooserParameters(**{**defaults, **fields}, token_bias=bias)


def generation(
    request_id: int,
    input_ids: list[int],
    max_new_tokens: int,
    parameters: pb.NextTokenChooserParameters | None = None,
    ignore_eos: bool = False,
    *,
    grammar: Grammar | None = None,
    top_n_tokens: int = 0,
    prompt_logprobs: bool = False,
    images: tuple[PromptImage, ...] = (),
) -> GenerationRequest:
    parameters = sampling() if parameters is None else parameters
    if grammar is not None:
        parameters.grammar, parameters.grammar_type = grammar.value, grammar_type(grammar)
    valid = ValidRequest(
        inputs="",
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        parameters=parameters,
        top_n_tokens=top_n_tokens,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=ignore_eos,
        images=images,
    )
    return valid.generation(request_id, parameters.seed)


def admission_of(request: GenerationRequest) -> pb.Admission:
    """What the shards will read of a request."""
    return pb.Admission.FromString(request.payload)


def parameters_of(request: GenerationRequest) -> pb.NextTokenChooserParameters:
    return admission_of(request).parameters
