"""The handlers: POST /v1/embeddings, /embed, /rerank and /predict."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from legato.api.embeddings import (
    Direction,
    EmbeddingObject,
    EmbeddingsRequest,
    EmbeddingsUsage,
    EmbedRequest,
    Prediction,
    PredictRequest,
    Rank,
    RerankRequest,
)
from legato.api.errors import InvalidRequest
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.embeddings.errors import EmptyBatch, WrongHead
from legato.http.routes.embeddings.texts import RawText, Side, TextReader
from legato.http.routes.embeddings.vectors import VectorCall, Vectors, check_dimensions, encoded, shaped
from legato.ipc.settings import EmbeddingSettings

T = TypeVar("T")

_embeddings_decoder = msgspec.json.Decoder(EmbeddingsRequest)
_embed_decoder = msgspec.json.Decoder(EmbedRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)
_predict_decoder = msgspec.json.Decoder(PredictRequest)
_encode = msgspec.json.Encoder().encode


class EmbeddingRoutes:
    def __init__(self, inference: Inference, settings: EmbeddingSettings) -> None:
        self._inference = inference
        self._settings = settings
        self._reader = TextReader(inference.tokenizer, inference.validator, settings)

    async def embeddings(self, exchange: Exchange) -> None:
        """OpenAI's."""
        await self._serve(exchange, _embeddings_decoder, self._embeddings)

    async def embed(self, exchange: Exchange) -> None:
        """TEI's, as the following."""
        await self._serve(exchange, _embed_decoder, self._embed)

    async def predict(self, exchange: Exchange) -> None:
        await self._serve(exchange, _predict_decoder, self._predict)

    async def rerank(self, exchange: Exchange) -> None:
        await self._serve(exchange, _rerank_decoder, self._rerank)

    @property
    def main(self) -> Callable[[Exchange], Coroutine[None, None, None]]:
        """What `POST /` does, as in TEI."""
        labels = self._settings.labels
        return self.embed if labels is None else self.rerank if len(labels) == 1 else self.predict

    async def _serve(
        self,
        exchange: Exchange,
        decoder: msgspec.json.Decoder[T],
        answer: Callable[[T, VectorCall], Awaitable[Any]],
    ) -> None:
        call = VectorCall(exchange, self._inference, self._reader)
        with nullcontext() if exchange.trace is None else exchange.trace.handler(exchange.route):
            request = await exchange.json(decoder, self._inference.settings.payload_limit)
            with self._inference.counted():
                body = _encode(await answer(request, call))
        await exchange.respond(body, call.succeeded())

    # ---- embeddings -----------------------------------------------------------------------------------------------

    async def _embeddings(self, request: EmbeddingsRequest, call: VectorCall) -> dict[str, Any]:
        """An `EmbeddingList`."""
        if self._settings.labels is not None:
            raise InvalidRequest("the model is not an embedding model but a classifier: /predict serves it", "model")
        check_dimensions(request.dimensions, self._settings.size)
        texts = self._reader.listed(request.input, "input")
        vectors = await call.vectors(texts, "input", prompt=self._reader.prompt(None))
        found = shaped(vectors, request.dimensions, self._settings.normalized)
        as_text = request.encoding_format == "base64"

        def item(index: int, vector: Vectors) -> EmbeddingObject:
            return EmbeddingObject(index=index, embedding=_base64(vector) if as_text else vector.tolist())

        usage = EmbeddingsUsage(prompt_tokens=call.num_tokens, total_tokens=call.num_tokens)
        model = self._inference.settings.model_id
        return {"object": "list", "data": await encoded(found, item), "model": model, "usage": usage}

    async def _embed(self, request: EmbedRequest, call: VectorCall) -> Any:
        check_dimensions(request.dimensions, self._settings.size)  # before the head: no model takes a wrong number
        if self._settings.labels is not None:
            raise WrongHead(
                "Model is not an embedding model but a classifier: /predict serves it, and /embed needs a server of an"
                " embedding model"
            )
        texts = self._reader.listed(request.inputs, "inputs")
        prompt, side = self._reader.prompt(request.prompt_name), _side(request.truncation_direction)
        vectors = await call.vectors(texts, "inputs", prompt=prompt, truncate=bool(request.truncate), side=side)
        found = shaped(vectors, request.dimensions, request.normalize is not False)
        return await encoded(found, lambda _, vector: vector.tolist())

    # ---- classes and ranks ----------------------------------------------------------------------------------------

    async def _predict(self, request: PredictRequest, call: VectorCall) -> Any:
        labels = self._require_labels("/predict")
        texts, is_batch = _sequences(request.inputs)
        self._reader.check_count(len(texts))
        side = _side(request.truncation_direction)
        vectors = await call.vectors(texts, "inputs", truncate=bool(request.truncate), side=side)
        scores = vectors if request.raw_scores else probabilities(vectors)
        predictions = [_predictions(labels, row) for row in scores.tolist()]
        return predictions if is_batch else predictions[0]

    async def _rerank(self, request: RerankRequest, call: VectorCall) -> list[Rank]:
        if len(labels := self._require_labels("/rerank")) != 1:
            raise WrongHead(
                f"model is not a re-ranker model: it has {len(labels)} labels and /rerank needs one; /predict serves it"
            )
        if not request.texts:
            raise EmptyBatch("`texts` cannot be empty", "texts")
        if not request.query:
            raise InvalidRequest("`query` cannot be empty", "query")
        self._reader.check_count(len(request.texts))
        pairs: list[RawText] = [(request.query, text) for text in request.texts]
        side = _side(request.truncation_direction)
        vectors = await call.vectors(pairs, "texts", truncate=bool(request.truncate), side=side)
        scores = (vectors if request.raw_scores else probabilities(vectors))[:, 0].tolist()
        ranks = [
            Rank(index=index, text=text if request.return_text else UNSET, score=score)
            for index, (text, score) in enumerate(zip(request.texts, scores, strict=True))
        ]
        return sorted(ranks, key=lambda rank: -rank.score)

    def _require_labels(self, path: str) -> tuple[str, ...]:
        if self._settings.labels is None:
            raise WrongHead(
                f"Model is not a classifier model but an embedding model: /embed serves it, and {path} needs a server"
                " of a model with a classification head"
            )
        return self._settings.labels


def probabilities(logits: Vectors) -> Vectors:
    """Of several labels, which exclude each other; of one, by itself."""
    numbers = logits.astype(np.float64)
    if logits.shape[1] == 1:
        found: Vectors = (1 / (1 + np.exp(-numbers.clip(-700, 700)))).astype(np.float32)
        return found
    powers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    found = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _predictions(labels: Sequence[str], scores: list[float]) -> list[Prediction]:
    """Best first."""
    predictions = [Prediction(score=score, label=label) for label, score in zip(labels, scores, strict=True)]
    return sorted(predictions, key=lambda each: -each.score)


def _sequences(inputs: str | list[str | list[str]]) -> tuple[list[RawText], bool]:
    """Texts and pairs, and whether they are a batch. A list of one or two texts is not: that is a text or a pair."""
    if isinstance(inputs, str):
        return [inputs], False
    if not inputs:
        raise EmptyBatch("`inputs` cannot be empty", "inputs")
    lists = [each for each in inputs if isinstance(each, list)]
    if not lists:
        return [_sequence([each for each in inputs if isinstance(each, str)])], False
    if len(lists) < len(inputs):
        raise _wrong_inputs()
    return [_sequence(each) for each in lists], True


def _sequence(texts: list[str]) -> str | tuple[str, str]:
    match texts:
        case [text]:
            return text
        case [first, second]:
            return first, second
    raise _wrong_inputs()


def _wrong_inputs() -> InvalidRequest:
    return InvalidRequest(
        "`inputs` must be a string, a pair of strings [string, string]"
        " or a batch of mixed strings and pairs [[string], [string, string], ...]",
        "inputs",
    )


def _side(direction: Direction) -> Side:
    return "left" if direction in ("left", "Left") else "right"


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
