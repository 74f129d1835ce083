"""POST /v1/chat/completions, and /chat_tokenize, which returns only the rendered prompt and its tokens."""

from __future__ import annotations

import msgspec

from legato.api.openai.requests import ChatRequest
from legato.api.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenizeResponse,
    Usage,
)
from legato.chat.answers import AnswerParser, ChatFormat
from legato.http.answering import Choice, serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.openai.calls import call_chunks, chat_message, finish_reason, parsed_message
from legato.http.routes.openai.chunks import ChatChunks, Envelope
from legato.http.routes.openai.conversation import check_conversation, last_answer, tokenize_conversation
from legato.http.routes.openai.conversation_job import ConversationJob
from legato.http.routes.openai.logprobs import chat_logprobs
from legato.http.routes.openai.serving import STREAM_ERRORS, ChunkWriter, identity_of, usage_of
from legato.http.routes.openai.token_names import TokenNames
from legato.http.streams import Piece
from legato.scheduling.state import FinishReason

_decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


class ChatRoutes:
    def __init__(self, inference: Inference, names: TokenNames) -> None:
        self._inference = inference
        self._names = names

    async def chat_completions(self, exchange: Exchange) -> None:
        await self.respond(exchange, await self._read(exchange))

    async def respond(self, exchange: Exchange, request: ChatRequest) -> None:
        """For routes that are chats under another name."""

        def make_job() -> ChatJob:
            return ChatJob(request, self._inference, self._names, self._inference.chat_format)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=bool(request.stream))

    async def chat_tokenize(self, exchange: Exchange) -> None:
        request = await self._read(exchange)
        check_conversation(request)
        async with self._inference.concurrency.validating(exchange.body_size, exchange.tenant):
            text, tokens = await tokenize_conversation(request, self._inference, self._inference.chat_format)
        body = _encode(ChatTokenizeResponse(tokenize_response=tokens, templated_text=text))
        await exchange.respond(body, {"content-type": "application/json"})

    async def _read(self, exchange: Exchange) -> ChatRequest:
        return await exchange.json(_decoder, self._inference.settings.payload_limit)


class ChatJob(ConversationJob):
    def __init__(self, request: ChatRequest, inference: Inference, names: TokenNames, format: ChatFormat) -> None:
        super().__init__(request, inference, format)
        self._names = names
        self._identity = identity_of("chatcmpl", request.model, inference.settings)
        # Goes before the text, where a message is continued and its client wants the whole of it.
        self.echo = last_answer(request) if request.echo else ""

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        identity = self._identity
        wanted = self.wanted(choices)
        parsers = [self.parser() for _ in wanted]
        described = [self._choice(choice, parser) for choice, parser in zip(wanted, parsers, strict=True)]
        return _encode(
            ChatCompletion(
                id=identity.id,
                created=identity.created,
                model=identity.model,
                system_fingerprint=identity.system_fingerprint,
                choices=described,
                usage=usage_of(billed, self.num_reasoning(parsers)),
            )
        )

    def _choice(self, choice: Choice, parser: AnswerParser | None) -> ChatChoice:
        if parser is None:
            message = ChatMessage(content=self.echo + choice.text)
        else:
            message = chat_message(parsed_message(parser, choice.pieces), self.echo)
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self.logprobs(choice, choice.pieces),
            finish_reason=finish_reason(choice, parser),
        )

    def num_reasoning(self, parsers: list[AnswerParser | None]) -> int | None:
        """Tokens; None where the model does not reason."""
        if self.format.reasoning is None:
            return None
        return sum(parser.num_reasoning_tokens for parser in parsers if parser is not None)

    def logprobs(self, choice: Choice, pieces: list[Piece]) -> ChatLogprobs | None:
        """`pieces` are the newest. The token that says "the end" is not part of the message."""
        if self.num_top is None:
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
            events = parser.feed(piece.text for piece in pieces) + (parser.finish() if ended else [])
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

    def usage(self) -> Usage:
        return usage_of(self._all, self._job.num_reasoning(self._parsers))

    def _begin(self, choice: Choice, chunks: ChatChunks) -> list[bytes]:
        self._not_begun.remove(choice.index)
        return [chunks.role(), chunks.content(self._job.echo)] if self._job.echo else [chunks.role()]
