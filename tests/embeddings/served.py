"""An application that embeds texts, with a backend that makes a vector of a text's tokens."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp
from tokenizers import Tokenizer, processors

from legato.http.app import create_app
from legato.ipc.settings import EmbeddingSettings, RouterSettings
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend
from tests.http.asgi import tokenizer as plain_tokenizer

SIZE = 4
EMBEDDING = EmbeddingSettings(
    size=SIZE, pooling="mean", prompts={"query": "ask: ", "text": ""}, max_client_batch_size=6
)
EMBED_SETTINGS = replace(SETTINGS, embedding=EMBEDDING)


def with_labels(*labels: str) -> RouterSettings:
    return replace(SETTINGS, embedding=replace(EMBEDDING, labels=labels, size=len(labels)))


def tokenizer() -> Tokenizer:
    """With types for the texts of a pair."""
    made = Tokenizer.from_str(plain_tokenizer().to_str())
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


def vector_of(request: GenerationRequest, size: int) -> list[float]:
    """Not of length one."""
    ids = request.input_ids
    return [float(len(ids)), float(sum(ids) % 97), 3.0, -1.0, *[0.5] * size][:size]


def embedder(size: int = SIZE, **changes: Any) -> FakeBackend:
    def script(request: GenerationRequest) -> list[Output]:
        vector = struct.pack(f"<{size}f", *vector_of(request, size))
        return [Output(0, 0.0, finish_reason=FinishReason.LENGTH, vector=vector, queue_time=0.25)]

    return FakeBackend(script, limits=replace(LIMITS, max_input_tokens=24), **changes)


def app_of(backend: FakeBackend, settings: RouterSettings = EMBED_SETTINGS) -> ASGIApp:
    return create_app(backend, tokenizer(), settings)  # type: ignore[arg-type]  # stands in for a scheduler
