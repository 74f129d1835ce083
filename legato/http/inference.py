"""From a parsed request to its streams: permits, validation, submission, and the record of how it went.

Shared by every route that generates.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from legato.api.errors import ClientGone, RequestError
from legato.api.native import GenerateRequest
from legato.chat.tools.tooling import ChatRenderer
from legato.http.exchange import Client
from legato.http.streams import Stream, Transcript
from legato.http.validation import Validator, ValidRequest, random_seed
from legato.ipc.seam import Backend
from legato.ipc.settings import RouterSettings
from legato.router.permits import PermitPool, Permits
from legato.telemetry.metrics import Metrics, Timings
from legato.text.detokenize import Vocabulary
from legato.vision.prompts import Images
from legato.vision.rules import ImageRules

logger = logging.getLogger("legato.router")


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers of a router have in common, and a router in one process has to itself."""

    permits: Permits
    # Numbers for requests.
    ids: Iterator[int]
    # The metrics, as text.
    scrape: Callable[[], Awaitable[bytes]]

    @staticmethod
    def by_nobody(settings: RouterSettings, metrics: Metrics) -> Shared:
        async def scrape() -> bytes:
            return metrics.render()

        return Shared(PermitPool(settings.max_concurrent_requests), itertools.count(1), scrape)


@dataclass(frozen=True, slots=True)
class Inference:
    backend: Backend
    tokenizer: Tokenizer
    # None: the model has no chat template.
    chat_template: ChatRenderer | None
    vocabulary: Vocabulary
    validator: Validator
    settings: RouterSettings
    metrics: Metrics
    shared: Shared

    @staticmethod
    def create(
        backend: Backend,
        tokenizer: Tokenizer,
        settings: RouterSettings,
        metrics: Metrics,
        chat_template: ChatRenderer | None = None,
        shared: Shared | None = None,
        image_rules: ImageRules | None = None,
    ) -> Inference:
        """`image_rules` are those of a model that sees."""
        images = None if image_rules is None else Images(image_rules, settings)
        return Inference(
            backend=backend,
            tokenizer=tokenizer,
            chat_template=chat_template,
            vocabulary=Vocabulary(tokenizer),
            validator=Validator(tokenizer, backend.limits, settings, backend.prepare, images),
            settings=settings,
            metrics=metrics,
            shared=Shared.by_nobody(settings, metrics) if shared is None else shared,
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one request, and its failure if it fails."""
        self.metrics.request_arrived()
        try:
            yield
        except RequestError as error:
            self.metrics.request_failed(error.counted_as)
            raise
        except ClientGone:
            self.metrics.request_failed("dropped")
            raise
        except Exception:
            self.metrics.request_failed("internal")
            raise

    @asynccontextmanager
    async def permitted(self, num: int) -> AsyncIterator[None]:
        """For as long as `num` sequences are in the house. Overloaded."""
        await self.shared.permits.take(num)
        try:
            yield
        finally:
            self.shared.permits.give_back(num)

    async def validate(self, request: GenerateRequest, best_of: int = 1) -> ValidRequest:
        valid = await self.validator.validate(request, best_of)
        self.validated(valid)
        return valid

    def validated(self, request: ValidRequest) -> None:
        self.metrics.request_validated(len(request.input_ids), request.max_new_tokens)

    @contextmanager
    def streams(self, request: ValidRequest, client: Client) -> Iterator[list[Stream]]:
        """One running stream per sequence."""
        seeds = [request.sampling.seed, *(random_seed() for _ in range(request.best_of - 1))]
        streams = [self.stream(request, seed, client.tenant) for seed in seeds]
        with self.running(streams, client):
            yield streams

    @contextmanager
    def running(self, streams: Sequence[Stream], client: Client) -> Iterator[None]:
        """Starts the streams. None of them runs on once this is left or the client is gone."""
        client.raise_if_gone()

        def cancel() -> None:
            for stream in streams:
                stream.cancel()

        client.when_gone(cancel)
        try:
            for stream in streams:
                stream.on_overrun = client.abort
                stream.start()
            yield
        finally:
            cancel()

    def stream(self, request: ValidRequest, seed: int, tenant: str) -> Stream:
        transcript = Transcript(
            self.vocabulary,
            () if self.backend.limits.has_encoder else request.input_ids,
            request.stop,
            include_stop=request.include_stop,
            min_tokens=request.sampling.min_new_tokens,
            spoken=request.spoken_token_ids,
        )
        return Stream(self.backend, request.generation(next(self.shared.ids), seed, tenant), transcript)

    def succeeded(self, stream: Stream, arrived_at: float, *others: Stream) -> Timings:
        """Records a request whose streams are complete: the times of the first, the tokens of all. People parse the
        log line."""
        timings = _timings(stream, arrived_at)
        num_tokens = sum(each.transcript.num_tokens for each in (stream, *others))
        num_deliveries = sum(each.num_deliveries for each in (stream, *others))
        self.metrics.request_succeeded(timings, num_tokens, num_skipped=num_tokens - num_deliveries)
        logger.info(
            "Success",
            extra={
                "fields": {
                    "total_time": timings.total,
                    "validation_time": timings.validation,
                    "queue_time": timings.queue,
                    "inference_time": timings.inference,
                    "time_per_token": timings.per_token,
                    "seed": stream.seed,
                }
            },
        )
        return timings


def _timings(stream: Stream, arrived_at: float) -> Timings:
    now = time.monotonic()
    # A backend that does not tell when it admits a request has no queue to speak of.
    admitted_at = stream.queued_at if stream.admitted_at is None else stream.admitted_at
    first_token_at = now if stream.first_token_at is None else stream.first_token_at
    return Timings(
        total=now - arrived_at,
        validation=stream.queued_at - arrived_at,
        queue=admitted_at - stream.queued_at,
        inference=now - admitted_at,
        per_token=(now - admitted_at) / stream.transcript.num_tokens,
        to_first_token=first_token_at - arrived_at,
    )
