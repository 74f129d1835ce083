"""From texts to vectors: one request to the scheduler for each text, one answer for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from legato.api.errors import ClientGone, InvalidRequest, RequestError
from legato.http.exchange import ClientConnection, Exchange
from legato.http.inference import Inference
from legato.http.routes.embeddings.texts import RawText, ReadOptions, TextReader, TokenizedText, num_characters
from legato.http.streams import error_of
from legato.http.telemetry import request_log
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import DEFAULT_PRIORITY, GenerationRequest, Output
from legato.telemetry.metrics import Timings

Vectors = npt.NDArray[np.float32]
# Numbers that are written down in one turn of the event loop: a few milliseconds.
NUMBERS_PER_TURN = 1 << 15
_encode = msgspec.json.Encoder().encode
_LITTLE_ENDIAN = np.dtype("<f4")


class VectorRun:
    """Texts on their way through the scheduler."""

    def __init__(self, inference: Inference, texts: Sequence[TokenizedText], tenant: str) -> None:
        self._scheduler = inference.scheduler
        priority = max(DEFAULT_PRIORITY, inference.settings.best_priority(tenant))
        self._requests = [_request(next(inference.ids), text, tenant, priority) for text in texts]
        self._outputs: list[Output | None] = [None] * len(texts)
        self._num_missing = len(texts)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, client: ClientConnection) -> list[Output]:
        """The outputs, in the order of the texts. The first error of a text ends all of them."""
        client.raise_if_gone()
        client.when_gone(lambda: self._fail(ClientGone()))
        try:
            for index, request in enumerate(self._requests):
                self._scheduler.submit(request, self._receiver(index))
            await self._done
        finally:
            for request, output in zip(self._requests, self._outputs, strict=True):
                if output is None:
                    self._scheduler.cancel(request.id)
        return [output for output in self._outputs if output is not None]

    def _receiver(self, index: int) -> Callable[[Output], None]:
        def receive(output: Output) -> None:
            self._outputs[index] = output
            self._num_missing -= 1
            if output.error is not None:
                self._fail(error_of(output))
            elif not self._num_missing and not self._done.done():
                self._done.set_result(None)

        return receive

    def _fail(self, error: RequestError | ClientGone) -> None:
        if not self._done.done():
            self._done.set_exception(error)


class VectorCall:
    """One HTTP request: has its texts tokenized and computed, and knows how long that took."""

    def __init__(self, exchange: Exchange, inference: Inference, reader: TextReader) -> None:
        self._exchange = exchange
        self._inference = inference
        self._reader = reader
        self._arrived_at = time.monotonic()
        self._num_texts = 0
        self._num_characters = 0
        self.num_tokens = 0
        self._timings: Timings | None = None

    async def vectors(self, texts: Sequence[RawText], name: str, **how: Unpack[ReadOptions]) -> Vectors:
        """[texts, size]. `name` is what the client calls the texts."""
        inference, exchange = self._inference, self._exchange
        if len(texts) > inference.settings.max_concurrent_requests:  # coming back later would not help
            raise InvalidRequest(f"{len(texts)} texts are more than this server accepts at once", name)
        with inference.concurrency.held(len(texts), exchange.tenant), exchange.client() as client:
            async with inference.concurrency.validating(exchange.body_size, exchange.tenant):
                tokenized = await self._reader.read(texts, name, **how)
            for text in tokenized:
                inference.metrics.request_validated(len(text.input_ids), 1)
            self._num_texts, self._num_characters = len(texts), num_characters(texts)
            self.num_tokens = sum(len(text.input_ids) for text in tokenized)
            queued_at = time.monotonic()
            outputs = await VectorRun(inference, tokenized, exchange.tenant).run(client)
        self._timings = self._measured(queued_at, outputs[0].queue_time)
        stacked = np.frombuffer(b"".join(output.vector or b"" for output in outputs), _LITTLE_ENDIAN)
        return stacked.reshape(len(texts), -1).astype(np.float32, copy=False)

    def _measured(self, queued_at: float, queue_time: float) -> Timings:
        now = time.monotonic()
        inference_time = max(now - queued_at - queue_time, 0.0)
        return Timings(
            total=now - self._arrived_at,
            validation=queued_at - self._arrived_at,
            queue=queue_time,
            inference=inference_time,
            per_token=inference_time / self.num_tokens,
            to_first_token=now - self._arrived_at,
        )

    def succeeded(self) -> dict[str, str]:
        """Records the request. Returns the headers of its answer, which are TEI's."""
        assert self._timings is not None, "its vectors were computed"
        timings = self._timings
        self._inference.metrics.request_succeeded(timings, 0)
        request_log.embedded(self._exchange.route, timings, self._num_texts, self.num_tokens)
        return {
            "content-type": "application/json",
            "x-compute-type": self._inference.settings.compute_type,
            "x-compute-time": f"{timings.total:.9f}",
            "x-compute-characters": str(self._num_characters),
            "x-compute-tokens": str(self.num_tokens),
            "x-total-time": _milliseconds(timings.total),
            "x-tokenization-time": _milliseconds(timings.validation),
            "x-queue-time": _milliseconds(timings.queue),
            "x-inference-time": _milliseconds(timings.inference),
        }


async def encoded(vectors: Vectors, item: Callable[[int, Vectors], Any]) -> list[msgspec.Raw]:
    """JSON of what `item` makes of each vector and its number. Others have their turn in between: an answer may have
    millions of numbers."""
    found: list[msgspec.Raw] = []
    per_turn = max(1, NUMBERS_PER_TURN // vectors.shape[1])
    for index, vector in enumerate(vectors):
        found.append(msgspec.Raw(_encode(item(index, vector))))
        if len(found) % per_turn == 0:
            await asyncio.sleep(0)
    return found


def check_dimensions(dimensions: int | None, size: int) -> None:
    if dimensions is not None and not 0 < dimensions <= size:
        raise InvalidRequest(f"`dimensions` must be >= 1 and <= {size}. Given: {dimensions}", "dimensions")


def shaped(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """The first `dimensions` of each, then of length one."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if not normalize:
        return cut
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    scaled: Vectors = cut / np.maximum(lengths, np.float32(1e-12))
    return scaled


def _request(request_id: int, text: TokenizedText, tenant: str, priority: int) -> GenerationRequest:
    payload = pb.Admission(second_start=text.second_start).SerializeToString() if text.second_start else b""
    return GenerationRequest(request_id, text.input_ids, 1, payload, ignore_eos=True, tenant=tenant, priority=priority)


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
