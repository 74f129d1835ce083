"""Log lines of requests: TGI's success line, which people parse, and an ERROR line for each failed request.

Neither has text of the client in it: no prompt, no stop string, no grammar, no name of a model or of a user.
"""

from __future__ import annotations

import logging
import re

from legato.api.errors import InvalidRequest, RequestError
from legato.api.native import GenerateParameters
from legato.api.openai.requests import ChatRequest, CompletionRequest
from legato.http.validation import ValidRequest
from legato.pb import generate_pb2 as pb
from legato.telemetry.metrics import Timings

logger = logging.getLogger("legato.router")

# TGI's name of the module that logs requests.
TARGET = "text_generation_router::server"
# TGI's names of the handlers that it has under other names than Legato.
SPAN_NAMES = {"compat": "compat_generate", "vertex": "vertex_compatibility", "invocations": "sagemaker_compatibility"}
# Fields of requests. Names in an error that are none of these may come from the client.
_FIELDS = frozenset(
    name for kind in (GenerateParameters, ChatRequest, CompletionRequest) for name in kind.__struct_fields__
) | {"inputs", "input", "texts", "query", "dimensions", "prompt_name"}
_QUOTED = re.compile(r"`(\w+)`")


def span_name(route: str) -> str:
    return SPAN_NAMES.get(route, route)


def success_fields(request: ValidRequest, num_sequences: int, timings: Timings, seed: int | None) -> dict[str, str]:
    """What TGI records in the span of a request, in its form."""
    return {
        "parameters": parameters_text(request, num_sequences),
        "total_time": duration_text(timings.total),
        "validation_time": duration_text(timings.validation),
        "queue_time": duration_text(timings.queue),
        "inference_time": duration_text(timings.inference),
        "time_per_token": duration_text(timings.per_token),
        "seed": _option(seed),
    }


def succeeded(
    route: str,
    request: ValidRequest,
    num_sequences: int,
    timings: Timings,
    seed: int | None,
    num_tokens: int,
    num_drafts: int = 0,
) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    span = {"name": span_name(route), **success_fields(request, num_sequences, timings, seed)}
    if num_drafts:  # TGI's line has no such field
        span["accepted_drafts"] = str(num_drafts)
    logger.info("Success", extra={"span": span, "target": TARGET})
    if logger.isEnabledFor(logging.DEBUG):
        sizes = {"characters": len(request.inputs), "input_tokens": len(request.input_ids), "tokens": num_tokens}
        logger.debug("Input and output", extra={"span": {"name": span["name"]}, "target": TARGET, "fields": sizes})


def embedded(route: str, timings: Timings, num_texts: int, num_tokens: int) -> None:
    if logger.isEnabledFor(logging.INFO):
        span = {
            "name": span_name(route),
            "total_time": duration_text(timings.total),
            "tokenization_time": duration_text(timings.validation),
            "queue_time": duration_text(timings.queue),
            "inference_time": duration_text(timings.inference),
        }
        fields = {"texts": num_texts, "tokens": num_tokens}
        logger.info("Success", extra={"span": span, "target": TARGET, "fields": fields})


def failed(route: str, error: RequestError, status: int) -> None:
    """One line, however the client learns of it. A client that hangs up has no error."""
    fields: dict[str, object] = {"error_type": error.error_type, "status": status, "error": type(error).__name__}
    if isinstance(error, InvalidRequest):
        fields |= {name: value for name, value in (("param", _param(error)), ("code", error.code)) if value}
    span = {"name": span_name(route) or "request"}
    word = "failed" if status >= 500 or status == 424 else "refused"
    logger.error("Request %s", word, extra={"span": span, "target": TARGET, "fields": fields})


def dropped(route: str) -> None:
    logger.info("Client disconnected", extra={"span": {"name": span_name(route)}, "target": TARGET})


def _param(error: InvalidRequest) -> str | None:
    """The field that is wrong: the first known one that the message names."""
    named = (error.param, *_QUOTED.findall(error.problem))
    return next((name for name in named if name in _FIELDS), None)


def parameters_text(request: ValidRequest, num_sequences: int) -> str:
    """In the form and order of Rust's `{:?}` of TGI's `GenerateParameters`; texts of the client are only counted.

    Written out, because it is made for every request.
    """
    chooser = request.parameters
    kind = pb.GrammarType.Name(chooser.grammar_type).removeprefix("GRAMMAR_TYPE_").lower()
    return (
        f"GenerateParameters {{ best_of: {_option(num_sequences if num_sequences > 1 else None)}"
        f", temperature: {_unless(chooser.temperature, 1.0)}"
        f", repetition_penalty: {_unless(chooser.repetition_penalty, 1.0)}"
        f", frequency_penalty: {_unless(chooser.frequency_penalty, 0.0)}"
        f", presence_penalty: {_unless(chooser.presence_penalty, 0.0)}"
        f", top_k: {_option(chooser.top_k or None)}"
        f", top_p: {_unless(chooser.top_p, 1.0)}"
        f", typical_p: {_unless(chooser.typical_p, 1.0)}"
        f", min_p: {_unless(chooser.min_p, 0.0)}"
        f", do_sample: {'true' if chooser.do_sample else 'false'}"
        f", max_new_tokens: Some({request.max_new_tokens})"
        f", stop: {f'[_; {len(request.stop)}]' if request.stop else '[]'}"
        f", watermark: {'true' if chooser.watermark else 'false'}"
        f", decoder_input_details: {'true' if request.prompt_logprobs else 'false'}"
        f", seed: {_option(chooser.seed if chooser.do_sample else None)}"
        f", top_n_tokens: {_option(request.top_n_tokens or None)}"
        f", grammar: {_option(None if kind == 'none' else kind)}"
        f", adapter_id: {_option(None if request.adapter is None else request.adapter.name)} }}"
    )


def _unless(value: float, neutral: float) -> str:
    return _option(None if value == neutral else f"{value:.7g}")


def _option(value: object | None) -> str:
    return "None" if value is None else f"Some({value})"


def duration_text(seconds: float) -> str:
    """As Rust writes a duration: 1.5s, 402.1µs."""
    if seconds >= 1:
        return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".") + "ms"
    if seconds >= 1e-6:
        return f"{seconds * 1e6:.3f}".rstrip("0").rstrip(".") + "µs"
    return f"{max(seconds, 0.0) * 1e9:.0f}ns"
