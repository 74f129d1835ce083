"""The table of routes of a server that embeds texts, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

from legato.api.embeddings import (
    EmbeddingList,
    EmbeddingServerInfo,
    EmbeddingsRequest,
    EmbedRequest,
    Prediction,
    PredictRequest,
    Rank,
    RerankRequest,
)
from legato.http.operations import OPERATIONS, Operation
from legato.ipc.settings import RouterSettings

_JSON = "application/json"
_ERRORS = (400, 413, 415, 422, 424, 429, 504)
_EMBED_EXAMPLE = {"inputs": "What is deep learning?"}
_RERANK_EXAMPLE: dict[str, Any] = {"query": "What is deep learning?", "texts": ["Deep learning is …", "Cheese is …"]}

# Those of every server, whatever it does with texts.
SHARED_PATHS = frozenset(
    {"/tokenize", "/health", "/ping", "/livez", "/readyz", "/startupz", "/drain", "/metrics", "/docs", "/ui"}
    | {"/dashboard", "/dashboard/data", "/pages/{name}", "/api-doc/openapi.json", "/v1/models", "/v1/models/{model}"}
)

EMBEDDING_OPERATIONS = [
    Operation(
        "post",
        "/v1/embeddings",
        "Embeddings, as in OpenAI's API",
        "Vectors are normalized if the checkpoint's `modules.json` says so, or if it does not exist.",
        EmbeddingsRequest,
        {"input": ["What is deep learning?", "Deep learning is …"], "model": "any"},
        {_JSON: EmbeddingList},
        (400, 413, 415, 429, 500, 504),
    ),
    Operation(
        "post",
        "/embed",
        "Embeddings, as in TEI",
        "Returns a list of embeddings, also for a single text.",
        EmbedRequest,
        _EMBED_EXAMPLE,
        {_JSON: list[list[float]]},
        _ERRORS,
    ),
    Operation(
        "post",
        "/rerank",
        "Order texts by their relevance to a query, as in TEI",
        "For models with a classification head of one label.",
        RerankRequest,
        _RERANK_EXAMPLE,
        {_JSON: list[Rank]},
        _ERRORS,
    ),
    Operation(
        "post",
        "/predict",
        "Classify texts or pairs of texts, as in TEI",
        "For models with a classification head. Returns labels, the most likely first; for several texts, one list"
        " per text.",
        PredictRequest,
        _EMBED_EXAMPLE,
        {_JSON: (list[Prediction], list[list[Prediction]])},
        _ERRORS,
    ),
    Operation(
        "post",
        "/",
        "What the model is for, as in TEI",
        "/embed, /rerank for a classification head of one label, /predict for one of several.",
        (EmbedRequest, RerankRequest, PredictRequest),
        _EMBED_EXAMPLE,
        {_JSON: (list[list[float]], list[Rank], list[Prediction], list[list[Prediction]])},
        _ERRORS,
    ),
    Operation("get", "/", "Health", "200 while the model is healthy. Browsers are redirected to /ui.", errors=(503,)),
    Operation("get", "/info", "Model and limits of this server", response={_JSON: EmbeddingServerInfo}),
    *(operation for operation in OPERATIONS if operation.path in SHARED_PATHS),
]


def operations(settings: RouterSettings) -> list[Operation]:
    """The routes of this server."""
    return OPERATIONS if settings.embedding is None else EMBEDDING_OPERATIONS


def needed_task(path: str, settings: RouterSettings) -> str | None:
    """The `--task` of servers that have a route for this path, if this one has none and they have."""
    task, others = ("embed", EMBEDDING_OPERATIONS) if settings.embedding is None else ("generate", OPERATIONS)
    return task if any(_matches(path, operation.path) for operation in others) else None


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        here == there or there.startswith("{") for here, there in zip(parts, wanted, strict=True)
    )
