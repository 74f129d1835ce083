"""One HTTP worker, a process of its own: `python -m legato.http.worker LINK LISTENER`, two file descriptors.

It speaks HTTP, tokenizes, and turns tokens into text. What to compute is decided at the other end of the link; when
that end is gone there is nothing left to do here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from starlette.types import ASGIApp
from tokenizers import Tokenizer

from legato.chat.template import ChatTemplate
from legato.common.errors import LegatoError
from legato.common.exits import end_with_parent
from legato.common.exposure import tls_context
from legato.common.gc import freeze_gc
from legato.common.logging import setup
from legato.http.app import create_app
from legato.http.scheduler import SchedulerClient
from legato.http.server import HttpServer
from legato.ipc import messages as msg
from legato.ipc.link import Link, decoder_for
from legato.modelfiles.files import ModelFiles
from legato.scheduling.adapters import AdapterInfo
from legato.telemetry.export import SpanExport, open_export
from legato.telemetry.loop_lag import LoopLag
from legato.telemetry.metrics import Metrics
from legato.telemetry.step_times import StepTimes
from legato.vision.rules import ImageRules, image_rules

# Seconds for the last spans to reach the collector when the worker ends.
LAST_SPANS = 0.5


class HttpWorker:
    """Two messages bring it up; then it passes requests to the scheduler and tokens to clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._link = Link(decoder_for(msg.ToWorker), self._on_message, self._on_lost)
        self._setup: asyncio.Future[msg.WorkerSetup] = asyncio.get_running_loop().create_future()
        self._serve: asyncio.Future[msg.Serve] = asyncio.get_running_loop().create_future()
        self._scheduler: SchedulerClient | None = None
        # What was told last; while the worker loads, what `Serve` says of it grows old.
        self._state: msg.ServerState | None = None
        self._adapters: list[AdapterInfo] | None = None
        self._metrics: Metrics | None = None
        self._spans: SpanExport | None = None
        self._server: HttpServer | None = None

    async def run(self, connection: socket.socket) -> None:
        await self._link.open(connection)
        try:
            tokenizer, chat_template, rules = await self._load(await self._setup)
            self._link.send(msg.Loaded())
            serve = await self._serve
            app = self._app(serve, tokenizer, chat_template, rules)
            settings = serve.settings
            tls = tls_context(settings.ssl_certfile, settings.ssl_keyfile)
            server = self._server = HttpServer(app, serve.grace, settings.payload_limit, tls=tls)
            freeze_gc()
            self._link.send(msg.Serving())
            await server.serve(sockets=[self._listener])
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close, LAST_SPANS)
        except LegatoError as error:
            self._link.send(msg.Failed(str(error)))
        self._link.close()

    async def _load(self, wanted: msg.WorkerSetup) -> tuple[Tokenizer, ChatTemplate | None, ImageRules | None]:
        setup(wanted.logger_level, wanted.json_output, "text-generation-router")
        if wanted.otlp_endpoint is not None:
            self._spans = open_export(wanted.otlp_endpoint, wanted.otlp_service_name, "http_worker")
        files = ModelFiles.open(Path(wanted.model), Path(wanted.hub_cache) if wanted.hub_cache else None)
        override = Path(wanted.tokenizer_config_path) if wanted.tokenizer_config_path else None
        tokenizer = await asyncio.to_thread(files.tokenizer)
        template = await asyncio.to_thread(ChatTemplate.load, files, override, wanted.payload_limit)
        return tokenizer, template, image_rules(files)

    def _app(
        self, serve: msg.Serve, tokenizer: Tokenizer, chat_template: ChatTemplate | None, rules: ImageRules | None
    ) -> ASGIApp:
        scheduler = self._scheduler = SchedulerClient(serve.limits, self._link.send)
        scheduler.on_state(self._state or serve.state)
        scheduler.on_adapters(serve.adapters if self._adapters is None else self._adapters)
        metrics = self._metrics = Metrics(serve.limits)
        LoopLag(lambda seconds: metrics.loop_lag("http_worker", seconds))
        if self._spans is not None:
            metrics.watch_spans(self._spans.take_counts)
            scheduler.step_times = StepTimes()
        return create_app(
            scheduler,
            tokenizer,
            serve.settings,
            metrics,
            chat_template,
            rules,
            serve.first_id,
            scheduler.scrape,
            self._spans,
        )

    def _on_message(self, message: msg.ToWorker) -> None:
        match message:
            case msg.Tokens():
                assert self._scheduler is not None
                self._scheduler.on_tokens(message)
            case msg.Answer():
                assert self._scheduler is not None
                self._scheduler.on_answer(message)
            case msg.ServerState():
                self._link.send(msg.Alive())
                self._state = message
                if self._scheduler is not None:
                    self._scheduler.on_state(message)
            case msg.Adapters(adapters):
                self._adapters = adapters
                if self._scheduler is not None:
                    self._scheduler.on_adapters(adapters)
            case msg.ChunkDone():
                assert self._scheduler is not None
                self._scheduler.on_chunk(message)
            case msg.AskFigures():
                self._link.send(msg.Report({} if self._metrics is None else self._metrics.figures()))
            case msg.WorkerSetup():
                self._setup.set_result(message)
            case msg.Serve():
                self._serve.set_result(message)
            case msg.Drain() if self._server is not None:
                self._server.should_exit = True
            case msg.Drain():  # a replacement that does not serve yet
                self._link.close()

    def _on_lost(self) -> None:
        """We closed the link, or the scheduler is gone: either way nothing can be served. Skip the ordinary exit, which
        would join the tokenizer threads."""
        with suppress(OSError):  # perhaps nobody reads the log any more
            sys.stdout.flush()
        os._exit(0)


def main() -> None:
    end_with_parent()  # one that hangs does not notice the end of its link, and would keep the port
    # Ctrl-C and a service manager's SIGTERM reach every process. The scheduler's process handles them for all.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    import uvloop

    connection, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:])

    async def run() -> None:
        await HttpWorker(listener).run(connection)

    uvloop.run(run())


if __name__ == "__main__":
    main()
