"""The native generation routes: POST /generate, /generate_stream and /, which is one or the other."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from legato.api.errors import RequestError
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
from legato.common.identity import random_seed
from legato.http import sse
from legato.http.answering import Choice, StreamErrors, serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.streams import Piece
from legato.http.validation import ValidRequest

STREAM_ERRORS = StreamErrors(sse.error_event, refuses_in_events=True)

_generate_decoder = msgspec.json.Decoder(GenerateRequest)
_compat_decoder = msgspec.json.Decoder(CompatGenerateRequest)
_encode = msgspec.json.Encoder().encode


class GenerateRoutes:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._settings = inference.settings

    async def generate(self, exchange: Exchange) -> None:
        request = await exchange.json(_generate_decoder, self._settings.payload_limit)
        await self._serve(exchange, request, stream=False)

    async def generate_stream(self, exchange: Exchange) -> None:
        request = await exchange.json(_generate_decoder, self._settings.payload_limit)
        await self._serve(exchange, request, stream=True)

    async def compat(self, exchange: Exchange) -> None:
        request = await exchange.json(_compat_decoder, self._settings.payload_limit)
        parameters = request.parameters or GenerateParameters(do_sample=True)
        if parameters.return_full_text is None:
            parameters = msgspec.structs.replace(parameters, return_full_text=self._settings.default_return_full_text)
        native = GenerateRequest(inputs=request.inputs, parameters=parameters)
        await self._serve(exchange, native, stream=bool(request.stream), as_list=True)

    async def _serve(
        self, exchange: Exchange, request: GenerateRequest, *, stream: bool, as_list: bool = False
    ) -> None:
        def make_job() -> GenerateJob:
            return GenerateJob(request, self._inference, stream=stream, as_list=as_list)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=stream)


class GenerateJob:
    num_prompts = 1
    prompt_only = False

    def __init__(self, request: GenerateRequest, inference: Inference, *, stream: bool, as_list: bool) -> None:
        self._request = request
        self._inference = inference
        self._as_list = as_list
        self._seed = 0
        parameters = request.parameters or GenerateParameters()
        self._details = bool(parameters.details or parameters.decoder_input_details)
        self._prefix = request.inputs if parameters.return_full_text else ""
        self.num_sequences = inference.validator.num_sequences(request.parameters, streaming=stream)

    async def requests(self) -> list[ValidRequest]:
        valid = await self._inference.validator.validate(self._request, self.num_sequences)
        self._seed = valid.parameters.seed
        return [valid]

    def seed(self, number: int) -> int:
        return self._seed if number == 0 else random_seed()

    def ranked(self, choices: list[Choice]) -> list[Choice]:
        best = max(choices, key=lambda choice: choice.mean_logprob)
        return [best, *(choice for choice in choices if choice is not best)]

    def billed(self, choices: list[Choice]) -> list[Choice]:
        return choices[:1]

    # ---- one body -------------------------------------------------------------------------------------------------

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        best, *others = choices
        response = GenerateResponse(generated_text=self._text(best))
        if self._details:
            response.details = Details(**self._details_of(best))
            if others:
                response.details.best_of_sequences = [
                    BestOfSequence(generated_text=self._text(other), **self._details_of(other)) for other in others
                ]
        return _encode([response] if self._as_list else response)

    def _details_of(self, choice: Choice) -> dict[str, Any]:
        """What the best sequence and the others report alike."""
        top_tokens = [piece.top_tokens for piece in choice.pieces]
        return {
            "finish_reason": choice.stream.transcript.finish_reason,
            "generated_tokens": len(choice.pieces),
            "seed": choice.stream.seed,
            "prefill": choice.stream.prefill(self._inference.vocabulary),
            "tokens": [piece.token for piece in choice.pieces],
            "top_tokens": top_tokens if any(top_tokens) else UNSET,
        }

    def _text(self, choice: Choice) -> str:
        return self._prefix + choice.text

    # ---- events ---------------------------------------------------------------------------------------------------

    def writer(self, choices: list[Choice]) -> GenerateJob:
        return self

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        transcript = choice.stream.transcript
        index = transcript.num_tokens - len(pieces) + 1
        last = pieces.pop() if transcript.finish_reason is not None else None
        data = b"".join([_token_event(number, piece) for number, piece in enumerate(pieces, index)])
        return data if last is None else data + self._last_event(choice, last)

    def end(self) -> bytes:
        return b""

    def fail(self, error: RequestError) -> bytes:
        return sse.error_event(error)

    def silence(self) -> bytes:
        return sse.KEEP_ALIVE

    async def record(self) -> None:
        """There is nothing to keep."""

    def _last_event(self, choice: Choice, piece: Piece) -> bytes:
        stream = choice.stream
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
                generated_text=self._text(choice),
                details=details if self._details else None,
            )
        )


def _token_event(index: int, piece: Piece) -> bytes:
    if piece.top_tokens:
        return sse.event(StreamResponse(index=index, token=piece.token, top_tokens=piece.top_tokens))
    return sse.token_event(index, piece.token)
