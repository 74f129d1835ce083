"""The JSON of servers that embed or classify texts: OpenAI's `/v1/embeddings`, and the routes of TEI.

Unknown fields are ignored, and `null` means the default everywhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from legato.api.native import U32

Flag = bool | None
Direction = Literal["right", "left", "Right", "Left"] | None
Truncate = Annotated[Flag, Meta(description="Truncate texts that are too long; otherwise they are an error.")]
TruncationDirection = Annotated[Direction, Meta(description="The end at which texts are truncated.")]
RawScores = Annotated[Flag, Meta(description="Return the model's raw outputs instead of values between 0 and 1.")]
Dimensions = Annotated[
    U32 | None,
    Meta(description="Truncate each embedding to this many elements.", extra_json_schema={"minimum": 1}),
]
Texts = Annotated[
    str | list[str | U32 | list[U32]],
    Meta(description="A text or its token ids, or a list of either."),
]


# ---- OpenAI's --------------------------------------------------------------------------------------------------------


class EmbeddingsRequest(Struct, kw_only=True, frozen=True):
    input: Texts
    model: Annotated[str | None, Meta(description="Any name: one model is served.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="`base64` encodes 32-bit little-endian floats.")
    ] = None
    dimensions: Dimensions = None
    user: Annotated[str | None, Meta(description="Ignored.")] = None


class EmbeddingObject(Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage


# ---- TEI's -----------------------------------------------------------------------------------------------------------


class EmbedRequest(Struct, kw_only=True, frozen=True):
    inputs: Texts
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: Annotated[
        str | None,
        Meta(description="Name of the prompt in `config_sentence_transformers.json` to put before the texts."),
    ] = None
    normalize: Annotated[Flag, Meta(description="Normalize the embeddings to length one.")] = True
    dimensions: Dimensions = None


class RerankRequest(Struct, kw_only=True, frozen=True):
    query: str
    texts: list[str]
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    raw_scores: RawScores = None
    return_text: Annotated[Flag, Meta(description="Return the texts in the response.")] = None


class Rank(Struct, kw_only=True):
    index: int
    text: str | UnsetType = UNSET
    score: float


class PredictRequest(Struct, kw_only=True, frozen=True):
    inputs: Annotated[
        str | list[str | list[str]],
        Meta(description="A text, a pair of texts, or a list of lists of one or two texts."),
    ]
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    raw_scores: RawScores = None


class Prediction(Struct, kw_only=True):
    score: float
    label: str


class PoolingInfo(Struct, kw_only=True):
    pooling: str


class LabelInfo(Struct, kw_only=True):
    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelKind(Struct, kw_only=True):
    """One of them."""

    embedding: PoolingInfo | UnsetType = UNSET
    classifier: LabelInfo | UnsetType = UNSET
    reranker: LabelInfo | UnsetType = UNSET


class EmbeddingServerInfo(Struct, kw_only=True):
    """`/info`, in TEI's order."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelKind
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    # Legato's own.
    task: Literal["embed"] = "embed"
    # Numbers in an embedding, or labels.
    dimensions: int
