"""What `/info` says of a server that embeds or classifies texts, in TEI's words."""

from __future__ import annotations

from legato.api.embeddings import EmbeddingServerInfo, LabelInfo, ModelKind, PoolingInfo
from legato.ipc.settings import EmbeddingSettings, RouterSettings
from legato.scheduling.state import ModelLimits


def server_info(settings: RouterSettings, embedding: EmbeddingSettings, limits: ModelLimits) -> EmbeddingServerInfo:
    return EmbeddingServerInfo(
        model_id=settings.model_id,
        model_sha=settings.model_sha,
        model_dtype=embedding.dtype,
        served_model_name=settings.model_id,
        model_type=_model_type(embedding),
        max_concurrent_requests=settings.max_concurrent_requests,
        max_input_length=limits.max_input_tokens,
        max_batch_tokens=limits.max_batch_total_tokens,
        max_batch_requests=None,
        max_client_batch_size=embedding.max_client_batch_size,
        auto_truncate=False,
        tokenization_workers=settings.validation_workers,
        version=settings.version,
        sha=settings.sha,
        docker_label=settings.docker_label,
        dimensions=embedding.size,
    )


def _model_type(embedding: EmbeddingSettings) -> ModelKind:
    labels = embedding.labels
    if labels is None:
        return ModelKind(embedding=PoolingInfo(pooling=embedding.pooling))
    names = {str(number): label for number, label in enumerate(labels)}
    described = LabelInfo(id2label=names, label2id={label: number for number, label in enumerate(labels)})
    return ModelKind(reranker=described) if len(labels) == 1 else ModelKind(classifier=described)
