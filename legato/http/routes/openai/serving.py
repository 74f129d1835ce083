"""What completions and chat completions share between a checked request and its answer."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from legato.api.errors import InvalidRequest, RequestError
from legato.api.openai.responses import CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage
from legato.common.identity import creation_time, new_hex
from legato.http import sse
from legato.http.answering import Choice, StreamErrors, first_streams, num_prompt_tokens
from legato.http.routes.openai import errors
from legato.http.routes.openai.chunks import DONE, Envelope, Identity
from legato.http.routes.openai.options import SharedOptions
from legato.http.streams import Piece
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import FinishReason as NativeReason

STREAM_ERRORS = StreamErrors(errors.event)
TGI = "tgi"


class OpenAIJob:
    """The half of a `Job` that does not depend on the route."""

    def __init__(self, options: SharedOptions, num_prompts: int, settings: RouterSettings) -> None:
        self.options = options
        self.num_prompts = num_prompts
        self.num_sequences = options.best_of
        wanted, total = num_prompts * options.best_of, settings.max_concurrent_requests
        if wanted > total:  # coming back later would not help
            raise InvalidRequest(f"{wanted} sequences in one request exceed the limit of this server: {total}", "n")

    def seed(self, number: int) -> int:
        return self.options.seed_of(number)

    def ranked(self, choices: list[Choice]) -> list[Choice]:
        """The `best_of` sequences of each prompt, the `n` best of them first and numbered anew; where all are wanted,
        as they are."""
        n, best_of = self.options.n, self.options.best_of
        if n == best_of:
            return choices
        best: list[Choice] = []
        rest: list[Choice] = []
        for first in range(0, len(choices), best_of):
            candidates = sorted(choices[first : first + best_of], key=lambda choice: -choice.mean_logprob)
            best += candidates[:n]
            rest += candidates[n:]
        for index, choice in enumerate(best):
            choice.index = index
        return best + rest

    def billed(self, choices: list[Choice]) -> list[Choice]:
        """Answers that are thrown away count, too."""
        return choices

    async def record(self) -> None:
        """There is nothing to keep."""

    def wanted(self, choices: list[Choice]) -> list[Choice]:
        """Of choices that are ranked, those that are returned."""
        return choices[: len(choices) // self.options.best_of * self.options.n]


class ChunkWriter:
    """The end of a stream, and the usage in its chunks if the client requested it."""

    def __init__(self, envelope: Envelope, options: SharedOptions, choices: list[Choice]) -> None:
        self.envelope = envelope
        self._options = options
        self._all = choices

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        if self._options.continuous_usage:
            self.envelope.show(self.usage())
        return self.chunks(choice, pieces)

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        raise AssertionError("a route has chunks of its own")

    def end(self) -> bytes:
        return (self.envelope.usage(self.usage()) if self._options.include_usage else b"") + DONE

    def usage(self) -> Usage:
        return usage_of(self._all)

    def fail(self, error: RequestError) -> bytes:
        return errors.event(error)

    def silence(self) -> bytes:
        return sse.KEEP_ALIVE


def identity_of(prefix: str, model: str | None, settings: RouterSettings) -> Identity:
    """`model` is the name to answer with. TGI's examples send its own name, which means the model that is served."""
    return Identity(
        id=f"{prefix}-{new_hex()}",
        created=creation_time(),
        model=settings.model_id if model in (None, TGI) else model,
        system_fingerprint=f"{settings.version}-{settings.docker_label or 'native'}",
    )


def finish_reason_of(choice: Choice) -> FinishReason:
    by_length = choice.prompt_only or choice.stream.transcript.finish_reason is NativeReason.LENGTH
    return "length" if by_length else "stop"


def usage_of(choices: Sequence[Choice], num_reasoning: int | None = None) -> Usage:
    """`num_reasoning` are the tokens of reasoning, of a model that does it."""
    prompt_tokens = num_prompt_tokens(choices)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(stream.num_cached for stream in first_streams(choices))
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(choice.stream.num_drafts for choice in choices if not choice.prompt_only),
            reasoning_tokens=UNSET if num_reasoning is None else num_reasoning,
        ),
    )
