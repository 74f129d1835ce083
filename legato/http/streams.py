"""The text of one generation: a Transcript converts outputs to tokens with text, a Stream delivers them to a reader.

A StreamGroup is for an answer that several generations make together: one reader, woken by whichever has news.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence

from msgspec import Struct

from legato.api.errors import (
    ClientGone,
    GenerationFailed,
    NotFound,
    Overloaded,
    RequestError,
    ServerLost,
    TimedOut,
)
from legato.api.native import PrefillToken, Token
from legato.http.scheduler import SchedulerClient
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.text.detokenize import Vocabulary
from legato.text.stopping import StopMatcher

logger = logging.getLogger(__name__)

# Tokens that wait for a client who does not read, besides what the connection holds: about a megabyte of events.
MAX_UNREAD = 4096


class Piece(Struct, gc=False):
    """What one token brought. `text` is its share of the generated text, which special tokens have no part in."""

    token: Token
    text: str
    top_tokens: list[Token]
    # Characters of text before this token, also those that a stop string still holds back or has cut off.
    offset: int


class Transcript:
    """What a generation has said so far, and whether that was all.

    The token that completes a stop string is cut right after it, and so is the text. Special tokens are visible to stop
    strings: people stop at `<|im_end|>`. Stop strings within the first `min_tokens` tokens are just text.

    Without `include_stop` (OpenAI's way) the text ends before the stop string, a token that ended the generation says
    nothing even if it has a text, and a stop string in the last token that was allowed counts as the reason.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = True,
        min_tokens: int = 0,
        spoken: Container[int] = (),
    ) -> None:
        """`spoken` are special tokens that are part of the text, by their names."""
        self._vocabulary = vocabulary
        self._special = vocabulary.special
        self._detokenizer = vocabulary.detokenizer(prompt)
        self._stops = StopMatcher(stop, include=include_stop) if any(stop) else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._spoken = spoken
        # Text that the stop matcher has not let through yet: (text, part of the generated text?)
        self._held: list[tuple[str, bool]] = []
        self._texts: list[str] = []
        self._num_characters = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text, if one did."""
        return None if self._stops is None else self._stops.found

    @property
    def has_stop_strings(self) -> bool:
        return self._stops is not None

    def add(self, output: Output) -> Piece:
        assert self.finish_reason is None, "the generation has ended"
        self.num_tokens += 1
        self.finish_reason = output.finish_reason
        token_id = output.token_id
        name = self._special.get(token_id)
        if self._is_hidden_end(output):
            text = ""
        elif name is None:
            text = self._detokenizer.push(token_id)
        else:
            text, name = (name, None) if token_id in self._spoken else ("", name)
        if self.finish_reason is not None:
            text += self._detokenizer.flush()
        offset = self._num_characters
        self._num_characters += len(text)
        shown = text if name is None else text + name
        if self._stops is not None and self.num_tokens > self._min_tokens:
            shown, text = self._stop(self._stops, text, name or "")
        self._texts.append(text)
        token = Token(token_id, shown, output.logprob, name is not None)
        return Piece(token, text, self._top_tokens(output) if output.top_tokens else [], offset)

    def _is_hidden_end(self, output: Output) -> bool:
        """Whether the generation ended because of this token, and the client does not want to see why."""
        return output.finish_reason not in (None, FinishReason.LENGTH) and not self._include_stop

    def _stop(self, stops: StopMatcher, text: str, name: str) -> tuple[str, str]:
        """What may be shown now, and how much of that is generated text."""
        shown = text + name
        released = stops.feed(shown)
        if stops.stopped:
            # The scheduler's reason comes first in TGI: the last token that was allowed has reason "length".
            if self.finish_reason is None or not self._include_stop:
                self.finish_reason = FinishReason.STOP_SEQUENCE
        elif self.finish_reason is not None:
            released += stops.flush()
        if not self._held and len(released) == len(shown):
            return shown, text
        self._held += [(text, True), (name, False)]
        return released, self._release(len(released))

    def _release(self, size: int) -> str:
        """Take the oldest `size` held characters; the answer is those of them that are generated text."""
        texts = []
        while self._held:
            text, generated = self._held[0]
            if generated:
                texts.append(text[:size])
            if len(text) > size:
                self._held[0] = text[size:], generated
                break
            size -= len(text)
            del self._held[0]
        return "".join(texts)

    def _top_tokens(self, output: Output) -> list[Token]:
        return [
            Token(token_id, self._vocabulary.text(token_id), logprob, token_id in self._special)
            for token_id, logprob in output.top_tokens or ()
        ]


class Wakeup:
    """What one reader waits for."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None


class Stream:
    """One sequence in progress: the scheduler adds outputs, a reader takes text."""

    def __init__(
        self, scheduler: SchedulerClient, request: GenerationRequest, transcript: Transcript, seed: int | None = None
    ) -> None:
        """`seed` is what the answer reports: None when nothing is random."""
        self._scheduler = scheduler
        self._request = request
        self.transcript = transcript
        self.seed = seed
        self.prompt_logprobs: list[float | None] = []
        self.prompt_top_tokens: list[list[tuple[int, float]] | None] = []
        # Prompt tokens that were in the prefix cache; known with the first token.
        self.num_cached = 0
        # Tokens that were drafts: the steps that brought them had brought others before.
        self.num_drafts = 0
        # Monotonic seconds, for the timing headers and histograms; seconds spent in the queue.
        self.queued_at = 0.0
        self.queue_time = 0.0
        self.first_token_at: float | None = None
        self.wakeup = Wakeup()
        # What to do about a client who reads more slowly than tokens come.
        self.on_overrun: Callable[[], None] | None = None
        # Says whether the reader should not be woken for more tokens yet, and calls what it is given when it should.
        self.waits: Callable[[Callable[[], None]], bool] | None = None
        self._is_waiting = False
        self._arrived: list[Output] = []
        self._patient = False
        self._ended = False
        self._cancelled = False

    @property
    def input_len(self) -> int:
        return len(self._request.input_ids)

    # ---- the scheduler's end --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.queued_at = time.monotonic()
        if self._ended:  # by what was replayed
            return
        self._scheduler.submit(self._request, self.receive)

    def receive(self, output: Output) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            self.prompt_logprobs = output.prompt_logprobs or []
            self.prompt_top_tokens = output.prompt_top_tokens or []
            self.num_cached = output.num_cached
            self.queue_time = output.queue_time
        self._arrived.append(output)
        if output.finish_reason is not None or output.error is not None:
            self.wake()
        elif not (self._patient or self._is_waiting):
            self._is_waiting = self.waits is not None and self.waits(self._go_on)
            if not self._is_waiting:
                self.wakeup.set()
        if len(self._arrived) > MAX_UNREAD and not self._patient:
            self._overrun()

    def _go_on(self) -> None:
        """Unless another choice has woken the reader meanwhile: one that is woken for nothing says that it is alive."""
        self._is_waiting = False
        if self._arrived:
            self.wakeup.set()

    def _overrun(self) -> None:
        if not self._cancelled:
            logger.warning(
                "A client reads too slowly: %d tokens wait for it; its request is cancelled", len(self._arrived)
            )
            self.cancel()
            if self.on_overrun is not None:
                self.on_overrun()

    def replay(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Piece]:
        """What the client has got from another server, before this one starts."""
        pieces = [self.transcript.add(Output(token_id)) for token_id in token_ids[:-1]]
        pieces += [self.transcript.add(Output(token_id, finish_reason=finish_reason)) for token_id in token_ids[-1:]]
        self._ended = self.transcript.finish_reason is not None
        if self._request.prompt_logprobs:  # they were sent, too
            self.prompt_logprobs = [None] * self.input_len
        return pieces

    # ---- the reader's end -----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `read` return, with nothing if nothing came."""
        self.wakeup.set()

    def cancel(self) -> None:
        """The reader is gone. Safe at any time, also after the end."""
        self._cancelled = True
        if not self._ended:
            self._ended = True
            self._scheduler.cancel(self._request.id)
        self.wake()

    @property
    def has_news(self) -> bool:
        return bool(self._arrived) or self._cancelled

    async def read(self) -> list[Piece]:
        """What has arrived since the last call; waits if nothing has."""
        if not self.has_news:
            await self.wakeup.wait()
        return self.take()

    def take(self) -> list[Piece]:
        """What has arrived since the last call, perhaps nothing."""
        if self._cancelled:
            raise ClientGone
        outputs, self._arrived = self._arrived, []
        return self._transcribe(outputs)

    async def read_all(self) -> list[Piece]:
        """The whole generation. Without stop strings the reader need not wake before it is complete."""
        self._patient = not self.transcript.has_stop_strings
        pieces: list[Piece] = []
        while self.transcript.finish_reason is None:
            pieces += await self.read()
        return pieces

    def _transcribe(self, outputs: list[Output]) -> list[Piece]:
        pieces: list[Piece] = []
        for i, output in enumerate(outputs):
            if output.error is not None:
                if pieces:  # tokens first, the error at the next call
                    self._arrived = outputs[i:]
                    break
                self._ended = True
                raise error_of(output)
            pieces.append(self.transcript.add(output))
            self.num_drafts += output.is_draft
            if self.transcript.finish_reason is not None:
                if output.finish_reason is None:  # a stop string, which the scheduler knows nothing of
                    self._scheduler.cancel(self._request.id)
                self._ended = True
                break
        return pieces

    def prefill(self, vocabulary: Vocabulary) -> list[PrefillToken]:
        """The prompt's tokens with their logprobs, if those were asked for."""
        if not self._request.prompt_logprobs:
            return []
        ids = self._request.input_ids
        logprobs = self.prompt_logprobs or [None] * len(ids)
        return [
            PrefillToken(token_id, vocabulary.text(token_id), logprob)
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]


def error_of(output: Output) -> RequestError:
    assert output.error is not None
    if output.retry_after:
        return Overloaded(output.retry_after)
    if output.is_unknown:
        return NotFound(output.error)
    if output.is_lost:
        return ServerLost(output.error)
    return TimedOut(output.error) if output.timed_out else GenerationFailed(output.error)


class StreamGroup:
    """Reads several streams at once. They share a wakeup: a step with tokens for all of them wakes the reader once."""

    def __init__(self, streams: Sequence[Stream], waits: Callable[[Callable[[], None]], bool] | None = None) -> None:
        self._streams = streams
        self._wakeup = Wakeup()
        for stream in streams:
            stream.wakeup, stream.waits = self._wakeup, waits

    @property
    def ended(self) -> bool:
        return all(stream.transcript.finish_reason is not None for stream in self._streams)

    async def read(self) -> list[tuple[int, list[Piece]]]:
        """What has arrived since the last call, by the stream's number; waits if nothing has."""
        if not any(stream.has_news for stream in self._streams):
            await self._wakeup.wait()
        return [(number, stream.take()) for number, stream in enumerate(self._streams) if stream.has_news]
