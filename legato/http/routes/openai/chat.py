"""POST /v1/chat/completions, and /chat_tokenize: the same body, but only what its prompt comes to."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from legato.api.errors import InvalidRequest
from legato.api.openai.requests import ChatRequest
from legato.api.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenizeResponse,
)
from legato.chat.tools.parser import CallParser
from legato.chat.tools.requests import ToolError
from legato.chat.tools.tooling import Tooling
from legato.http.answering import Choice, serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.openai.calls import call_chunks, called_message, finish_reason
from legato.http.routes.openai.chunks import ChatChunks, Envelope
from legato.http.routes.openai.conversation import (
    check_conversation,
    last_answer,
    read_conversation,
    tokenize_conversation,
    tool_use,
)
from legato.http.routes.openai.logprobs import chat_logprobs
from legato.http.routes.openai.options import SharedOptions, grammar_of, shared_options, top_logprobs
from legato.http.routes.openai.serving import STREAM_ERRORS, ChunkWriter, OpenAIJob, identity_of, usage_of
from legato.http.routes.openai.token_names import TokenNames
from legato.http.streams import Piece
from legato.http.validation import ValidRequest
from legato.scheduling.state import FinishReason

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


class ChatRoutes:
    def __init__(self, inference: Inference, names: TokenNames) -> None:
        self._inference = inference
        self._names = names
        self._tooling = Tooling.of(inference.tokenizer, inference.chat_template, inference.settings.tool_call_parser)

    async def chat_completions(self, exchange: Exchange) -> None:
        await self.respond(exchange, await self._read(exchange))

    async def respond(self, exchange: Exchange, request: ChatRequest) -> None:
        """For routes that are chats under another name."""

        def make_job() -> ChatJob:
            return ChatJob(request, self._inference, self._names, self._tooling)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=bool(request.stream))

    async def chat_tokenize(self, exchange: Exchange) -> None:
        request = await self._read(exchange)
        check_conversation(request)
        async with self._inference.concurrency.validating(exchange.body_size, exchange.tenant):
            text, tokens = await tokenize_conversation(request, self._inference, self._tooling)
        body = _encode(ChatTokenizeResponse(tokenize_response=tokens, templated_text=text))
        await exchange.respond(body, {"content-type": "application/json"})

    async def _read(self, exchange: Exchange) -> ChatRequest:
        return await exchange.json(_decoder, self._inference.settings.payload_limit)


class ChatJob(OpenAIJob):
    prompt_only = False

    def __init__(self, request: ChatRequest, inference: Inference, names: TokenNames, tooling: Tooling) -> None:
        check_conversation(request)
        self._tooling = tooling
        self._use = tool_use(request)
        self._request = request
        self._inference = inference
        self._names = names
        super().__init__(self._options(), 1, inference.settings)
        self._num_top = _num_top(request)
        self._max_tokens = _max_tokens(request)
        self._identity = identity_of("chatcmpl", request.model, inference.settings)
        # Goes before the text, where a message is continued and its client wants the whole of it.
        self.echo = last_answer(request) if request.echo else ""

    def _options(self) -> SharedOptions:
        request, validator, use = self._request, self._inference.validator, self._use
        if use is None:
            return shared_options(request, validator)
        if grammar_of(request.response_format) is not None:
            raise ToolError("Grammar and tools are mutually exclusive")
        calls = self._tooling.grammar(use, schema_lenient=validator.settings.schema_lenient)
        return replace(shared_options(request, validator, calls=calls), spoken_token_ids=self._tooling.spoken)

    async def requests(self) -> list[ValidRequest]:
        prompt = await read_conversation(self._request, self._inference, self._tooling, self._use)
        room = self._inference.validator.max_new_tokens(len(prompt.ids), self._max_tokens)
        await self.options.check_grammar(self._inference.validator)
        valid = self.options.request(prompt.text, prompt.ids, room, self._num_top)
        return [replace(valid, images=prompt.images)]

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        identity = self._identity
        return _encode(
            ChatCompletion(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                system_fingerprint=identity.system_fingerprint,
                choices=[self._choice(choice) for choice in self.wanted(choices)],
                usage=usage_of(billed),
            )
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        parser = self.parser()
        if parser is None:
            message = ChatMessage(content=self.echo + choice.text)
        else:
            message = called_message(parser, self.echo, choice.text)
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self.logprobs(choice, choice.pieces),
            finish_reason=finish_reason(choice, parser),
        )

    def parser(self) -> CallParser | None:
        """For one answer. None: nothing in it is a call."""
        return None if self._use is None else self._tooling.parser(self._use)

    def logprobs(self, choice: Choice, pieces: list[Piece]) -> ChatLogprobs | None:
        """`pieces` are the newest. The token that says "the end" is not part of the message."""
        if self._num_top is None:
            return None
        if choice.stream.transcript.finish_reason is FinishReason.EOS_TOKEN:
            pieces = pieces[:-1]
        return chat_logprobs(pieces, self._names)

    def writer(self, choices: list[Choice]) -> ChatWriter:
        envelope = Envelope(self._identity, "chat.completion.chunk", with_usage=self.options.include_usage)
        return ChatWriter(self, envelope, choices)


class ChatWriter(ChunkWriter):
    """The role, then content and calls, at last the finish reason."""

    def __init__(self, job: ChatJob, envelope: Envelope, choices: list[Choice]) -> None:
        super().__init__(envelope, job.options, choices)
        self._job = job
        self._chunks = [ChatChunks(envelope, choice.index) for choice in choices]
        self._parsers = [job.parser() for _ in choices]
        self._not_begun = set(range(len(choices)))

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        chunks = self._chunks[choice.index]
        written = self._begin(choice, chunks) if choice.index in self._not_begun else []
        logprobs = self._job.logprobs(choice, pieces)
        parser = self._parsers[choice.index]
        ended = choice.stream.transcript.finish_reason is not None
        if parser is not None:
            text = "".join(piece.text for piece in pieces)
            events = parser.feed(text) + (parser.finish() if ended else [])
            written += call_chunks(chunks, events, logprobs)
        elif logprobs is None:
            written += [chunks.content(piece.text) for piece in pieces if piece.text]
        else:
            text = "".join(piece.text for piece in pieces)
            if text or logprobs.content:
                written.append(chunks.content(text, logprobs))
        if ended:
            written.append(chunks.finish(finish_reason(choice, parser)))
        return b"".join(written)

    def _begin(self, choice: Choice, chunks: ChatChunks) -> list[bytes]:
        self._not_begun.remove(choice.index)
        return [chunks.role(), chunks.content(self._job.echo)] if self._job.echo else [chunks.role()]


def _num_top(request: ChatRequest) -> int | None:
    """None: no logprobs at all."""
    num_top = top_logprobs("top_logprobs", request.top_logprobs)
    if num_top and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return num_top or 0 if request.logprobs else None


def _max_tokens(request: ChatRequest) -> int | None:
    for name, value in (
        ("max_completion_tokens", request.max_completion_tokens),
        ("max_tokens", request.max_tokens),
    ):
        if value == 0:
            raise InvalidRequest(f"`{name}` must be strictly positive", name)
        if value is not None:
            return value
    return None
