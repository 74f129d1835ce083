"""The JSON of the native API: what comes in and what goes out, field by field, in TGI's order.

Unknown fields are ignored. `null` means the default everywhere, also where TGI insisted on a value. Types and ranges of
integers are checked while parsing; everything else has an order and a wording, and is checked in `validation.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import force_setattr

from legato.scheduling.state import FinishReason

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# What `grammar_shapes.py` takes, for the reader of the documentation.
_GRAMMAR_TYPES = ["text", "json", "json_object", "json_schema", "regex", "choice", "lark"]
GRAMMAR_SHAPE: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": _GRAMMAR_TYPES}, "value": {}},
}


def _range(**bounds: float) -> Meta:
    """Bounds for the reader of the documentation. Checked in `validation.py`, in TGI's order and words."""
    return Meta(extra_json_schema=dict(bounds))


def none_for_null(struct: Struct, name: str) -> None:
    """A field that is not decoded does not know `null`."""
    value = getattr(struct, name)
    if isinstance(value, Raw) and bytes(memoryview(value)[:5]) == b"null":
        force_setattr(struct, name, None)


class GenerateParameters(Struct, kw_only=True, frozen=True):
    """How to generate. Every field is optional."""

    best_of: Annotated[
        Count | None, Meta(description="Generate this many sequences and return the one with the best mean logprob.")
    ] = None
    temperature: Annotated[
        float | None,
        _range(exclusiveMinimum=0),
        Meta(description="Divides the logits before sampling.", examples=[0.5]),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _range(exclusiveMinimum=0),
        Meta(description="1.0 is no penalty; divides the positive logits of tokens seen before.", examples=[1.03]),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _range(minimum=-2, maximum=2),
        Meta(description="Lowers tokens by how often they were generated.", examples=[0.1]),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _range(minimum=-2, maximum=2),
        Meta(description="Lowers tokens that were generated at all.", examples=[0.1]),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
        _range(exclusiveMinimum=0),
        Meta(description="Sample from the k most likely tokens.", examples=[10]),
    ] = None
    top_p: Annotated[
        float | None,
        _range(exclusiveMinimum=0, maximum=1),
        Meta(description="Sample from the most likely tokens that together reach this probability.", examples=[0.95]),
    ] = None
    typical_p: Annotated[
        float | None,
        _range(exclusiveMinimum=0, maximum=1),
        Meta(description="Locally typical sampling.", examples=[0.95]),
    ] = None
    min_p: Annotated[
        float | None,
        _range(minimum=0, maximum=1),
        Meta(description="Drop tokens less likely than this share of the most likely one.", examples=[0.05]),
    ] = None
    do_sample: Annotated[
        bool | None,
        Meta(description="Sample instead of taking the most likely token. Without `parameters`, sampling is on."),
    ] = False
    max_new_tokens: Annotated[
        U32 | None, Meta(description="At most this many tokens; as many as fit if not given.", examples=[20])
    ] = None
    return_full_text: Annotated[
        bool | None, Meta(description="Put `inputs` in front of the generated text.", examples=[False])
    ] = None
    stop: Annotated[
        list[str] | None, Meta(description="Stop after any of these strings, which stay part of the text.")
    ] = []
    truncate: Annotated[Count | None, Meta(description="Keep only the last N tokens of the inputs.")] = None
    watermark: Annotated[bool | None, Meta(description="Mark the text (Kirchenbauer et al., 2023).")] = False
    details: Annotated[bool | None, Meta(description="Return tokens, logprobs and the finish reason.")] = False
    decoder_input_details: Annotated[
        bool | None, Meta(description="Return the tokens of the inputs with their logprobs; implies `details`.")
    ] = False
    seed: Annotated[
        int | None,
        _range(minimum=0, maximum=2**64 - 1),
        Meta(description="Makes sampling repeatable; random if not given."),
    ] = None
    top_n_tokens: Annotated[
        U32 | None, Meta(description="Return the N most likely tokens at every position, with `details`.")
    ] = None
    grammar: Annotated[
        Raw,  # decoded when its size is known
        Meta(
            extra_json_schema={"anyOf": [GRAMMAR_SHAPE, {"type": "null"}]},
            description="What the text must look like: `type` is `json`, `json_object`, `json_schema`, `regex`,"
            " `choice` or `lark`, `value` the schema, the expression, the list of strings or the grammar.",
            examples=[{"type": "regex", "value": "[0-9]+"}],
        ),
    ] = None  # type: ignore[assignment]
    adapter_id: Annotated[str | None, Meta(description="A LoRA adapter that is loaded, by name.")] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="Token id to a number between -100 and 100 that is added to its logit."),
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after an end-of-sequence token.")] = False
    priority: Annotated[
        int | None,
        _range(minimum=0, maximum=9),
        Meta(description="Priority in the queue, from 0 (first) to 9, as far as the API key allows it. Default: 5."),
    ] = None

    def __post_init__(self) -> None:
        none_for_null(self, "grammar")


class GenerateRequest(Struct, kw_only=True, frozen=True):
    inputs: Annotated[str, Meta(description="The prompt.", examples=["The capital of France is"])]
    parameters: GenerateParameters | None = None


class CompatGenerateRequest(GenerateRequest, kw_only=True, frozen=True):
    stream: Annotated[bool | None, Meta(description="Answer like /generate_stream.")] = False


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    inputs: Annotated[str, Meta(description="The text to tokenize.", examples=["The capital of France is"])]


class Token(Struct, gc=False):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct, gc=False):
    id: int
    text: str
    # Nothing predicts the first token.
    logprob: float | None


class BestOfSequence(Struct, kw_only=True):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    # Null when nothing was random.
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(Struct, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct, kw_only=True):
    """One event. The last one has the whole text, and the details if they were asked for."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(Struct, kw_only=True):
    id: int
    text: str
    start: Annotated[int, Meta(description="First byte of the token in the UTF-8 text.")]
    stop: Annotated[int, Meta(description="The byte after its last.")]


class Info(Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class ErrorResponse(Struct, kw_only=True):
    error: str
    error_type: str
