"""What every generating route shares: the model's text side, the scheduler, and the record of how requests went."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from legato.api.errors import ClientGone, Draining, RequestError
from legato.chat.answers import ChatFormat
from legato.chat.tools.tooling import ChatRenderer
from legato.http.concurrency import ConcurrencyLimit
from legato.http.exchange import ClientConnection
from legato.http.scheduler import SchedulerClient
from legato.http.streams import Stream, Transcript
from legato.http.validation import Validator, ValidRequest
from legato.ipc.settings import RouterSettings
from legato.telemetry.metrics import Metrics, Timings
from legato.text.detokenize import Vocabulary
from legato.text.infill import InfillFormat
from legato.vision.prompts import Images
from legato.vision.rules import ImageRules


@dataclass(frozen=True, slots=True)
class Inference:
    scheduler: SchedulerClient
    tokenizer: Tokenizer
    # None: the model has no chat template.
    chat_template: ChatRenderer | None
    chat_format: ChatFormat
    vocabulary: Vocabulary
    # None: the vocabulary has no tokens for filling in the middle.
    infill: InfillFormat | None
    validator: Validator
    settings: RouterSettings
    metrics: Metrics
    concurrency: ConcurrencyLimit
    # Numbers for requests, different in every worker.
    ids: Iterator[int]
    # The metrics of all processes, as text.
    scrape: Callable[[], Awaitable[bytes]]

    @staticmethod
    def create(
        scheduler: SchedulerClient,
        tokenizer: Tokenizer,
        settings: RouterSettings,
        metrics: Metrics,
        chat_template: ChatRenderer | None = None,
        image_rules: ImageRules | None = None,
        first_id: int = 1,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
    ) -> Inference:
        """`image_rules` are those of a model with a vision encoder. Without `scrape`, this process is the only one."""
        images = None if image_rules is None else Images(image_rules, settings)

        async def render() -> bytes:
            return metrics.render()

        return Inference(
            scheduler=scheduler,
            tokenizer=tokenizer,
            chat_template=chat_template,
            chat_format=ChatFormat.of(tokenizer, chat_template, settings.tool_call_parser, settings.reasoning_parser),
            vocabulary=Vocabulary(tokenizer),
            infill=InfillFormat.of(tokenizer),
            validator=Validator(
                tokenizer, scheduler.limits, settings, scheduler.prepare, images, lambda: scheduler.adapters
            ),
            settings=settings,
            metrics=metrics,
            concurrency=ConcurrencyLimit(settings.max_concurrent_requests),
            ids=itertools.count(first_id),
            scrape=render if scrape is None else scrape,
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one request, and its failure if it fails."""
        self.metrics.request_arrived()
        try:
            if self.scheduler.state.draining:
                raise Draining
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

    @contextmanager
    def running(self, streams: Sequence[Stream], client: ClientConnection) -> Iterator[None]:
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

    def stream(
        self,
        request: ValidRequest,
        seed: int,
        tenant: str,
        make: Callable[..., Stream] = Stream,
        emitted_ids: Sequence[int] = (),
    ) -> Stream:
        """`make` makes a stream of another kind, for a request that is traced; `emitted_ids` are tokens that another
        server has generated."""
        transcript = Transcript(
            self.vocabulary,
            () if self.scheduler.limits.has_encoder else request.input_ids,
            request.stop,
            include_stop=request.include_stop,
            min_tokens=request.parameters.min_new_tokens,
            spoken=request.spoken_token_ids,
        )
        priority = max(request.priority, self.settings.best_priority(tenant))
        generation = request.generation(next(self.ids), seed, tenant, priority)
        if emitted_ids:
            generation = msgspec.structs.replace(generation, emitted_ids=list(emitted_ids))
        return make(self.scheduler, generation, transcript, seed if request.parameters.do_sample else None)

    def succeeded(self, streams: Sequence[Stream], arrived_at: float) -> Timings:
        """Records a request whose streams are complete: the times of the first, the tokens of all."""
        timings = _timings(streams[0], arrived_at)
        self.metrics.request_succeeded(timings, sum(stream.transcript.num_tokens for stream in streams))
        return timings


def _timings(stream: Stream, arrived_at: float) -> Timings:
    now = time.monotonic()
    inference = now - stream.queued_at - stream.queue_time
    first_token_at = now if stream.first_token_at is None else stream.first_token_at
    return Timings(
        total=now - arrived_at,
        validation=stream.queued_at - arrived_at,
        queue=stream.queue_time,
        inference=inference,
        per_token=inference / stream.transcript.num_tokens,
        to_first_token=first_token_at - arrived_at,
    )
