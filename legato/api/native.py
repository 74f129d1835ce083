"""Request and response bodies of the native API, with the fields in TGI's order.

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
        Meta(
            description="Divides the positive logits of tokens that occurred before; 1.0 means no penalty.",
            examples=[1.03],
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _range(minimum=-2, maximum=2),
        Meta(description="Subtracted from a token's logit for every time it was generated.", examples=[0.1]),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _range(minimum=-2, maximum=2),
        Meta(description="Subtracted from the logits of tokens that were generated at least once.", examples=[0.1]),
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
        Meta(
            description="Drop tokens whose probability is below this fraction of that of the most likely token.",
            examples=[0.05],
        ),
    ] = None
    do_sample: Annotated[
        bool | None,
        Meta(
            description="Sample instead of decoding greedily. Default: false, but true without a `parameters` object."
        ),
    ] = False
    max_new_tokens: Annotated[
        U32 | None, Meta(description="Maximum generated tokens. Default: as many as fit.", examples=[20])
    ] = None
    return_full_text: Annotated[
        bool | None, Meta(description="Return `inputs` in front of the generated text.", examples=[False])
    ] = None
    stop: Annotated[
        list[str] | None, Meta(description="Stop strings; the text ends after them and includes them.")
    ] = []
    truncate: Annotated[Count | None, Meta(description="Keep only the last N tokens of the inputs.")] = None
    watermark: Annotated[bool | None, Meta(description="Watermark the text (Kirchenbauer et al., 2023).")] = False
    details: Annotated[bool | None, Meta(description="Return tokens, logprobs and the finish reason.")] = False
    decoder_input_details: Annotated[
        bool | None, Meta(description="Return the tokens of the inputs with their logprobs; implies `details`.")
    ] = False
    seed: Annotated[
        int | None,
        _range(minimum=0, maximum=2**64 - 1),
        Meta(description="Makes sampling reproducible. Default: random."),
    ] = None
    top_n_tokens: Annotated[
        U32 | None, Meta(description="Return the N most likely tokens at every position, with `details`.")
    ] = None
    grammar: Annotated[
        Raw,  # decoded when its size is known
        Meta(
            extra_json_schema={"anyOf": [GRAMMAR_SHAPE, {"type": "null"}]},
            description="Format that the text must have: `type` is `json`, `json_object`, `json_schema`, `regex`,"
            " `choice` or `lark`; `value` is the schema, the expression, the list of strings or the grammar.",
            examples=[{"type": "regex", "value": "[0-9]+"}],
        ),
    ] = None  # type: ignore[assignment]
    adapter_id: Annotated[str | None, Meta(description="Name of a loaded LoRA adapter. Default: the base model.")] = (
        None
    )
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="Maps token ids to values between -100 and 100, which are added to their logits."),
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="Continue after an end-of-sequence token.")] = False
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
    stream: Annotated[bool | None, Meta(description="Respond like /generate_stream.")] = False


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
    """One event. The last one has the whole text, and the details if requested."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(Struct, kw_only=True):
    id: int
    text: str
    start: Annotated[int, Meta(description="Offset of the token's first byte in the UTF-8 text.")]
    stop: Annotated[int, Meta(description="Offset after the token's last byte.")]


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
