"""POST /v1/completions."""

from __future__ import annotations

import msgspec

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import CompletionRequest
from legato.api.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from legato.http.answering import Choice, serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.openai.chunks import CompletionChunks, Envelope
from legato.http.routes.openai.logprobs import completion_logprobs, joined, prompt_logprobs
from legato.http.routes.openai.options import shared_options, top_logprobs
from legato.http.routes.openai.prompts import CompletionPrompt, raw_prompts, read_prompt, with_suffix
from legato.http.routes.openai.serving import (
    STREAM_ERRORS,
    ChunkWriter,
    OpenAIJob,
    finish_reason_of,
    identity_of,
    usage_of,
)
from legato.http.routes.openai.token_names import TokenNames
from legato.http.streams import Piece
from legato.http.validation import ValidRequest

_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


class CompletionRoutes:
    def __init__(self, inference: Inference, names: TokenNames) -> None:
        self._inference = inference
        self._names = names

    async def completions(self, exchange: Exchange) -> None:
        request = await exchange.json(_decoder, self._inference.settings.payload_limit)
        await self.respond(exchange, request)

    async def respond(self, exchange: Exchange, request: CompletionRequest) -> None:
        """For routes that are completions under another name."""

        def make_job() -> CompletionJob:
            return CompletionJob(request, self._inference, self._names)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=bool(request.stream))


class CompletionJob(OpenAIJob):
    def __init__(self, request: CompletionRequest, inference: Inference, names: TokenNames) -> None:
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequest("`max_tokens` must be strictly positive, unless `echo` is set", "max_tokens")
        self._inference = inference
        self._names = names
        options = shared_options(request, inference.validator, request.best_of)
        self._num_top = top_logprobs("logprobs", request.logprobs)
        prompts = raw_prompts(request, inference.settings.max_client_batch_size)
        self._raw_prompts = with_suffix(prompts, request, inference.infill)
        super().__init__(options, len(self._raw_prompts), inference.settings)
        self._prompts: list[CompletionPrompt] = []
        self._echo = bool(request.echo)
        self._max_tokens = request.max_tokens
        # TGI answers with the model's id, whatever it was called; an adapter has a name of its own.
        adapter = None if options.adapter is None else options.adapter.name
        self._identity = identity_of("cmpl", adapter, inference.settings)

    @property
    def prompt_only(self) -> bool:
        return self._max_tokens == 0

    async def requests(self) -> list[ValidRequest]:
        validator, vocabulary = self._inference.validator, self._inference.vocabulary
        self._prompts = [await read_prompt(raw, validator, vocabulary, echoed=self._echo) for raw in self._raw_prompts]
        # Logprobs of a prompt come with the token that follows it, so one there must be.
        wanted = 1 if self.prompt_only else self._max_tokens
        requests = [
            self.options.request(
                prompt.text,
                prompt.ids,
                validator.max_new_tokens(len(prompt.ids), wanted),
                self._num_top,
                prompt_logprobs=self._echo and self._num_top is not None,
            )
            for prompt in self._prompts
        ]
        await self.options.check_grammar(validator)
        return requests

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        identity = self._identity
        return _encode(
            Completion(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                system_fingerprint=identity.system_fingerprint,
                choices=[self._choice(choice) for choice in self.wanted(choices)],
                usage=usage_of(billed),
            )
        )

    def _choice(self, choice: Choice) -> CompletionChoice:
        generated = self.logprobs(choice, choice.pieces)
        echoed = self.echoed_logprobs(choice)
        return CompletionChoice(
            index=choice.index,
            text=self.echoed_text(choice) + choice.text,
            logprobs=joined(echoed, generated) if echoed and generated else generated,
            finish_reason=finish_reason_of(choice),
        )

    def writer(self, choices: list[Choice]) -> CompletionWriter:
        envelope = Envelope(self._identity, "text_completion", with_usage=self.options.include_usage)
        return CompletionWriter(self, envelope, choices)

    # ---- parts of a choice ----------------------------------------------------------------------------------------

    def echoed_text(self, choice: Choice) -> str:
        return self._prompts[choice.prompt].text if self._echo else ""

    def echoed_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        if self._num_top is None or not self._echo:
            return None
        return prompt_logprobs(self._prompts[choice.prompt], choice.stream, self._num_top, self._names)

    def logprobs(self, choice: Choice, pieces: list[Piece]) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        return completion_logprobs([] if choice.prompt_only else pieces, len(self.echoed_text(choice)), self._names)


class CompletionWriter(ChunkWriter):
    """A chunk per token that says something, or whose logprobs do. The last one has the finish reason."""

    def __init__(self, job: CompletionJob, envelope: Envelope, choices: list[Choice]) -> None:
        super().__init__(envelope, job.options, choices)
        self._job = job
        self._chunks = [CompletionChunks(envelope, choice.index) for choice in choices]
        self._not_echoed = set(range(len(choices)))

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        chunks = self._chunks[choice.index]
        written = [self._echo(choice, chunks)] if choice.index in self._not_echoed else []
        last = pieces.pop() if choice.stream.transcript.finish_reason is not None else None
        for piece in pieces:
            logprobs = self._job.logprobs(choice, [piece])
            if piece.text or logprobs is not None:
                written.append(chunks.text(piece.text, logprobs))
        if last is not None:
            text = "" if choice.prompt_only else last.text
            # Where nothing is said of usage, the last chunk of a choice tells its own, as in TGI.
            usage = None if self._job.options.include_usage else usage_of([choice])
            logprobs = self._job.logprobs(choice, [last])
            written.append(chunks.finish(text, logprobs, finish_reason_of(choice), usage))
        return b"".join(written)

    def _echo(self, choice: Choice, chunks: CompletionChunks) -> bytes:
        self._not_echoed.remove(choice.index)
        text = self._job.echoed_text(choice)
        return chunks.text(text, self._job.echoed_logprobs(choice)) if text else b""
