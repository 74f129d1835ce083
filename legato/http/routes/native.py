"""The native generation routes: POST /generate, /generate_stream and /, which is one or the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from legato.api.errors import ClientGone, InternalError, Overloaded, RequestError
from legato.api.native import (
    BestOfSequence,
    CompatGenerateRequest,
    Details,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    StreamDetails,
    StreamResponse,
)
from legato.http import sse
from legato.http.exchange import Client, Exchange
from legato.http.inference import Inference, logger
from legato.http.streams import Piece, Stream
from legato.http.validation import ValidRequest
from legato.telemetry.metrics import Timings

_generate_decoder = msgspec.json.Decoder(GenerateRequest)
_compat_decoder = msgspec.json.Decoder(CompatGenerateRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Sequence:
    """A finished generation."""

    stream: Stream
    pieces: list[Piece]

    @property
    def mean_logprob(self) -> float:
        return sum(piece.token.logprob or 0.0 for piece in self.pieces) / len(self.pieces)


class GenerateRoutes:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._settings = inference.settings

    async def generate(self, exchange: Exchange) -> None:
        request = await exchange.json(_generate_decoder, self._settings.payload_limit)
        await self._answer(exchange, request, as_list=False)

    async def generate_stream(self, exchange: Exchange) -> None:
        request = await exchange.json(_generate_decoder, self._settings.payload_limit)
        await self._stream(exchange, request)

    async def compat(self, exchange: Exchange) -> None:
        request = await exchange.json(_compat_decoder, self._settings.payload_limit)
        parameters = request.parameters or GenerateParameters(do_sample=True)
        if parameters.return_full_text is None:
            parameters = msgspec.structs.replace(parameters, return_full_text=self._settings.default_return_full_text)
        native = GenerateRequest(inputs=request.inputs, parameters=parameters)
        if request.stream:
            await self._stream(exchange, native)
        else:
            await self._answer(exchange, native, as_list=True)

    # ---- one answer -----------------------------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange, request: GenerateRequest, *, as_list: bool) -> None:
        arrived_at = time.monotonic()
        inference = self._inference
        with inference.counted():
            best_of = inference.validator.num_sequences(request.parameters, streaming=False)
            async with inference.permitted(best_of):
                with exchange.client() as client:
                    valid = await inference.validate(request, best_of)
                    with inference.streams(valid, client) as streams:
                        texts = await asyncio.gather(*(stream.read_all() for stream in streams))
        sequences = [Sequence(stream, pieces) for stream, pieces in zip(streams, texts, strict=True)]
        best = max(sequences, key=lambda sequence: sequence.mean_logprob)
        timings = inference.succeeded(best.stream, arrived_at)
        response = self._response(valid, best, [other for other in sequences if other is not best])
        await exchange.respond(_encode([response] if as_list else response), self._headers(valid, best.stream, timings))

    def _response(self, request: ValidRequest, best: Sequence, others: list[Sequence]) -> GenerateResponse:
        response = GenerateResponse(generated_text=_text(request, best.stream))
        if request.details:
            response.details = Details(**self._details(best))
            if others:
                response.details.best_of_sequences = [
                    BestOfSequence(generated_text=_text(request, other.stream), **self._details(other))
                    for other in others
                ]
        return response

    def _details(self, sequence: Sequence) -> dict[str, Any]:
        """What the winner and the others say alike."""
        top_tokens = [piece.top_tokens for piece in sequence.pieces]
        return {
            "finish_reason": sequence.stream.transcript.finish_reason,
            "generated_tokens": len(sequence.pieces),
            "seed": sequence.stream.seed,
            "prefill": sequence.stream.prefill(self._inference.vocabulary),
            "tokens": [piece.token for piece in sequence.pieces],
            "top_tokens": top_tokens if any(top_tokens) else UNSET,
        }

    def _headers(self, request: ValidRequest, stream: Stream, timings: Timings) -> dict[str, str]:
        return {
            "content-type": "application/json",
            "x-compute-type": self._settings.compute_type,
            "x-compute-time": f"{timings.total:.9f}",
            "x-compute-characters": str(len(request.inputs)),
            "x-total-time": _milliseconds(timings.total),
            "x-validation-time": _milliseconds(timings.validation),
            "x-queue-time": _milliseconds(timings.queue),
            "x-inference-time": _milliseconds(timings.inference),
            "x-time-per-token": _milliseconds(timings.per_token),
            "x-prompt-tokens": str(stream.input_len),
            "x-generated-tokens": str(stream.transcript.num_tokens),
        }

    # ---- events ---------------------------------------------------------------------------------------------------

    async def _stream(self, exchange: Exchange, request: GenerateRequest) -> None:
        """Status 200 and then whatever happens, also a refusal: TGI's clients look for errors among the events. Only
        an overloaded server says so in the status, for the load balancers before it."""
        arrived_at = time.monotonic()
        headers = {
            **sse.HEADERS,
            "x-compute-type": self._settings.compute_type,
            "x-compute-characters": str(len(request.inputs)),
        }
        try:
            with self._inference.counted():
                async with self._inference.permitted(1):
                    await exchange.start(headers)
                    with exchange.client() as client:
                        await self._events(exchange, client, request, arrived_at)
        except (Overloaded, ClientGone):
            raise
        except RequestError as error:
            await exchange.write(sse.error_event(error))
        except Exception:
            logger.exception("A stream failed")
            await exchange.write(sse.error_event(InternalError()))
        await exchange.end()

    async def _events(self, exchange: Exchange, client: Client, request: GenerateRequest, arrived_at: float) -> None:
        self._inference.validator.num_sequences(request.parameters, streaming=True)
        valid = await self._inference.validate(request)
        with self._inference.streams(valid, client) as (stream,):
            keep_alive = sse.KeepAlive(stream, self._settings.keep_alive)
            try:
                while stream.transcript.finish_reason is None:
                    index = stream.transcript.num_tokens + 1
                    pieces = await stream.read()
                    last = pieces.pop() if stream.transcript.finish_reason is not None else None
                    data = b"".join([_token_event(number, piece) for number, piece in enumerate(pieces, index)])
                    if last is not None:
                        data += self._last_event(valid, stream, last)
                        self._inference.succeeded(stream, arrived_at)
                    await exchange.write(data or sse.KEEP_ALIVE)
                    keep_alive.sent()
            finally:
                keep_alive.close()

    def _last_event(self, request: ValidRequest, stream: Stream, piece: Piece) -> bytes:
        transcript = stream.transcript
        assert transcript.finish_reason is not None
        details = StreamDetails(
            finish_reason=transcript.finish_reason,
            generated_tokens=transcript.num_tokens,
            seed=stream.seed,
            input_length=stream.input_len,
        )
        return sse.event(
            StreamResponse(
                index=transcript.num_tokens,
                token=piece.token,
                top_tokens=piece.top_tokens or UNSET,
                generated_text=_text(request, stream),
                details=details if request.details else None,
            )
        )


def _token_event(index: int, piece: Piece) -> bytes:
    if piece.top_tokens:
        return sse.event(StreamResponse(index=index, token=piece.token, top_tokens=piece.top_tokens))
    return sse.token_event(index, piece.token)


def _text(request: ValidRequest, stream: Stream) -> str:
    return request.inputs + stream.transcript.text if request.return_full_text else stream.transcript.text


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
